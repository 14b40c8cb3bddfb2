"""All generated tasks of the package reasoning-gym, with their own graders.

The package runs only in other processes (`judges.py`): some of its graders run an answer as Python code, and what it
generates depends on the order of sets, which is fixed there. A hash of the canonical form of a question decides the
split and holds out one question in four. So `gcd of 2, 412` and `gcd of 412, 2` are on the same side.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import count as count_up
from typing import Any

from solera.errors import SoleraError
from solera.protocols import Codec
from solera.records import Prompt
from solera.streams import stream_seed
from solera.tasks.final import after_thinking, boxed_answer, tagged_answer
from solera.tasks.judges import Judges, NoVerdictError, judges
from solera.tasks.prompting import encode_prompt
from solera.tasks.single_turn import GENERATED_COLUMNS

HELD_OUT_SHARE = 4
SPLIT = b"gym-split"
"""Salt of the hash that splits the problems. With this salt, both sides of the split have problems of every task, even
of tasks with only four to eight problems."""
CHUNK = 500
"""Problems of one dataset. The next ones come from a new dataset with its own seed."""
BLOCK = 32
"""Problems that several processes generate together."""
TRIES = 64
LANES = 2**22
"""If a problem of the stream cannot be used, it is replaced by one this much further on."""
LONGEST = 10_000
"""Longest answer that is graded, in characters."""
_WORDED = re.compile(r"\s*\\(?:text|textbf|mathrm)\s?\{([^{}]*)\}\s*")
_HARMLESS = re.compile(
    r"(?:[\w+\-*/%=<>^,:;!?|&~$#)]|\.(?![^\W\d])|(?:^|(?<=[-+*/%=<>^,(|&~]))\()*", re.ASCII
)  # brackets and dots only if they start no call and name no attribute
_TERM = r"-?[\w.]*\w"
_LIST = re.compile(rf"(?<![\w.]){_TERM}(?:(?:, ?(?:and )?| and ){_TERM})+(?!\w)")
_COMMUTATIVE = re.compile(
    rf"(?<![\w.*×/^-])(?<![-+*×/^] ){_TERM}(?:(?: ?\+ ?{_TERM})+|(?: ?\* ?{_TERM})+"
    rf"|(?: ?× ?{_TERM})+)(?! ?[-+*×/^(]|\w)"
)
NONSENSE = "qwxz {["
NONSENSE_SCORE = 0.5
"""If nonsense scores at least this much, the task's grader is no longer used."""
PATIENCE = 120
"""Limit of computing time, in seconds, for generating a few problems. Some tasks need a second for one."""


class Gym:
    """The problems of one task: an endless training stream that depends on the seed, and fixed held-out ones."""

    columns = GENERATED_COLUMNS

    def __init__(
        self, name: str, level: int | None, codec: Codec, template: str, seed: int, longest: int | None = None
    ) -> None:
        """`level` is a level of the task's curriculum; `None` means its defaults. Prompts longer than `longest`, or
        that the model cannot read, are left out."""
        self._name = name
        self._level = level
        self._codec = codec
        self._template = template
        self._longest = longest
        self._start = 2**30 + stream_seed(seed) % 2**20 * CHUNK
        self._block = lru_cache(maxsize=16)(self._fetch)

    def prompt(self, index: int) -> Prompt:
        for lane in range(TRIES):
            position = self._start + lane * LANES + index
            question = self._block(position // BLOCK)[position % BLOCK]
            if not is_held_out(question) and (prompt := self._prompt(position, question)):
                return prompt
        raise SoleraError(
            f"task gym:{self._name}: none of {TRIES} generated problems can be used for training{self._hint()}"
        )

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` held-out problems with different canonical forms, the same in every run."""
        found: dict[str, Prompt] = {}
        for position, question in self._first(TRIES * count):
            form = canonical(question)
            if form not in found and is_held_out(question) and (prompt := self._prompt(position, question)):
                found[form] = prompt
                if len(found) == count:
                    break
        if not found:
            raise SoleraError(f"task gym:{self._name}: no problem can be held out{self._hint()}")
        return list(found.values())

    def place(self, prompt: Prompt) -> str:
        return prompt.key

    def _first(self, most: int) -> Iterator[tuple[int, str]]:
        for block in count_up():
            for offset, question in enumerate(self._fetch(block)):
                yield block * BLOCK + offset, question
            if (block + 1) * BLOCK >= most:
                return

    def _fetch(self, block: int) -> list[str]:
        share = BLOCK // 4
        calls = [(self._name, self._level, block * BLOCK + start, share) for start in range(0, BLOCK, share)]
        try:
            return [question for part in _gym().ask_all("questions", calls, PATIENCE) for question in part]
        except NoVerdictError as error:
            raise SoleraError(f"task gym:{self._name}: problems cannot be generated: {error}") from error

    def _prompt(self, position: int, question: str) -> Prompt | None:
        try:
            ids = encode_prompt(self._codec, self._template, question)
        except SoleraError:  # reported if no problem can be used
            return None
        if self._longest is not None and len(ids) > self._longest:
            return None
        level = "" if self._level is None else f"@{self._level}"
        data = {"prompt": question, "gym": (self._name, self._level, position)}
        return Prompt(f"gym:{self._name}{level}/{position}", ids, data)

    def _hint(self) -> str:
        lengths, refused = [], list[SoleraError]()
        for question in self._fetch(0):
            try:
                lengths.append(len(encode_prompt(self._codec, self._template, question)))
            except SoleraError as error:
                refused.append(error)
        if not lengths:
            return f": the first {refused[0]}: use another --model"
        if self._longest is None:
            return ""
        return (
            f": the model accepts prompts of at most {self._longest} tokens, but the shortest of 32 has {min(lengths)}"
        )


def is_held_out(question: str) -> bool:
    digest = blake2b(canonical(question).encode(), digest_size=4, person=SPLIT).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def canonical(question: str) -> str:
    """A form that is equal for questions that differ only in case, in white space, or in the order of a list, sum or
    product.

    >>> canonical("Find the GCD of 412, 2."), canonical("5 + 3 - 2 or 4 * 3 * 1")
    ('find the gcd of 2, 412.', '5 + 3 - 2 or 1 * 3 * 4')
    """
    plain = " ".join(question.casefold().split())
    listed = _LIST.sub(lambda items: ", ".join(sorted(re.split(", and |, ?| and ", items[0]))), plain)
    return _COMMUTATIVE.sub(_in_order, listed)


def _in_order(terms: re.Match[str]) -> str:
    """Sort the terms of a sum or product. A term next to another operation stays in place."""
    sign = next(sign for sign in "+*×" if sign in terms[0])
    return f" {sign} ".join(sorted(term.strip() for term in terms[0].split(sign)))


async def gym(text: str, problem: tuple[str, int | None, int], finished: bool) -> float:
    """Return the task's own score, between 0 and 1, of the answer in the text."""
    answer = given_answer(text, finished)
    if answer is None or len(answer) > LONGEST:
        return 0.0
    try:
        score = await _gym().judge("grader", problem, (answer.strip(),), could_be_code(answer))
    except NoVerdictError:
        return 0.0
    # Code in the answer may have forged it, with any type.
    return min(max(score, 0.0), 1.0) if type(score) is float and math.isfinite(score) else 0.0


def could_be_code(answer: str) -> bool:
    """Whether Python, or sympy's parser, could call something when it evaluates the answer.

    Numbers, words, and brackets at the start or after an operator are harmless: a call has its brackets after a name or
    an expression. Everything else could be code.

    >>> [could_be_code(answer) for answer in ("12.5", "(3 + 4) * 2", "A is a knave.", "Q _ _", "exit()", "[x.y]")]
    [False, False, False, False, True, True]
    """
    return not _HARMLESS.fullmatch("".join(answer.split()))


def given_answer(text: str, finished: bool) -> str | None:
    r"""Return the answer in a text: the content of the last `<answer>…</answer>`, or else the whole text if it was not
    cut off. If there is a `\boxed{…}`, return the content of the last box instead. Text before `</think>` is ignored.

    >>> given_answer(r"<answer>\boxed{\text{Monday}}</answer>", True), given_answer("Monday", False)
    ('Monday', None)
    """
    text = after_thinking(text)
    answer = tagged_answer(text)
    boxed = boxed_answer(text if answer is None else answer)
    if boxed is not None and boxed.complete:
        worded = _WORDED.fullmatch(boxed.text)
        return worded[1] if worded else boxed.text
    return text if answer is None and finished else answer


def check_gym(name: str, level: int | None) -> None:
    """Refuse a task or a level that reasoning-gym does not have."""
    try:
        complaint = _gym().ask("complaint", name, level, limit=PATIENCE)
    except NoVerdictError as error:
        complaint = f"problems cannot be generated: {error}"
    if complaint:
        raise SoleraError(f"task gym:{name}{'' if level is None else f' at level {level}'}: {complaint}")


def expected_answer(key: str) -> str | None:
    """Return the task's answer to the problem of this key, or `None` if it has none."""
    match = re.fullmatch(r"gym:([^/@]+)(?:@([0-9]+))?/([0-9]+)", key)
    if match is None:
        return None
    level = None if match[2] is None else int(match[2])
    try:
        return _gym().ask("answer", match[1], level, int(match[3]), limit=PATIENCE)
    except NoVerdictError as error:
        raise SoleraError(f"task gym:{match[1]}: its answers cannot be generated: {error}") from error


def _gym() -> Judges:
    return judges(__name__, "gym")


# Everything below runs in the other processes.


def prepare() -> None:
    import reasoning_gym  # noqa: F401


def complaint(name: str, level: int | None) -> str | None:
    from reasoning_gym.factory import CURRICULA, DATASETS

    from solera.config import perhaps

    if name not in DATASETS or name == "composite":
        return f"reasoning-gym has no such task{perhaps(name, sorted(DATASETS.keys() - {'composite'}))}"
    if level is not None and (name not in CURRICULA or level < 0):
        return "its level must be 0 or more" if level < 0 else "it has no levels: leave task.level unset"
    _entry(name, level, 0)
    return None


def questions(name: str, level: int | None, first: int, count: int) -> list[str]:
    return [_entry(name, level, position)["question"] for position in range(first, first + count)]


def answer(name: str, level: int | None, position: int) -> str | None:
    given = _entry(name, level, position)["answer"]
    return None if given is None else str(given)


def grader(name: str, level: int | None, position: int) -> Callable[[str], float]:
    """The task's own score of an answer to one problem."""
    if _passes_nonsense(name, level, position):
        right = str(_entry(name, level, position)["answer"]).casefold()
        return lambda answer: float(answer.casefold() == right)
    return partial(_score, name, level, position)


@lru_cache(maxsize=4096)
def _passes_nonsense(name: str, level: int | None, position: int) -> bool:
    """Whether the task's grader is broken: one accepts any text as `True`."""
    try:
        return _score(name, level, position, NONSENSE) >= NONSENSE_SCORE
    except Exception:  # a grader may refuse what it cannot read
        return False


def _score(name: str, level: int | None, position: int, answer: str) -> float:
    return float(_dataset(name, level, position // CHUNK).score_answer(answer, _entry(name, level, position)))


@lru_cache(maxsize=4096)
def _entry(name: str, level: int | None, position: int) -> dict[str, Any]:
    return _dataset(name, level, position // CHUNK)[position % CHUNK]


@lru_cache(maxsize=64)
def _dataset(name: str, level: int | None, chunk: int) -> Any:
    from reasoning_gym.factory import CURRICULA, DATASETS, create_dataset

    drawn = {"seed": chunk * CHUNK, "size": CHUNK}
    if level is None:
        return create_dataset(name, **drawn)
    curriculum = CURRICULA[name]()
    curriculum.set_global_level(level)
    return DATASETS[name][0](curriculum.generate_configuration(drawn))
