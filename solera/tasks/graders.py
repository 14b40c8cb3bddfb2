"""The graders that come with Solera: plain functions of the response text and the expected answer.

`finished` is False if the response was cut off by the length limit.
"""

import re
from collections.abc import Callable

from solera.errors import SoleraError, kind_of
from solera.tasks.expression import countdown, countdown_problem
from solera.tasks.final import boxed_answer
from solera.tasks.numbers import answer_number, number

Grader = Callable[[str, str, bool], bool]


def verbatim(text: str, answer: str, finished: bool) -> bool:
    """The text equals the answer, character for character, and then ends."""
    return finished and text == answer


def exact(text: str, answer: str, finished: bool) -> bool:
    """The text equals the answer, except for surrounding white space, and then ends.

    >>> exact(" 82\\n", "82", True), exact("82", "82", False)
    (True, False)
    """
    return finished and text.strip() == answer.strip()


_NOTHING = re.compile(r"\\(?:text|mathrm|mathbf)(?=\{\s*\})|\\(?:q?quad\b|[,;:! ])|[\s{}$~]")
"""Content of a box that still counts as empty."""


def boxed(text: str, answer: str, finished: bool) -> bool:
    r"""The text has an answer in a `\boxed{…}`, whatever it is.

    >>> boxed(r"so \boxed{\frac{1}{2}}", "", True), boxed(r"\boxed{}", "", True), boxed(r"\boxed{4", "", True)
    (True, False, False)
    """
    found = boxed_answer(text)
    return found is not None and found.complete and bool(_NOTHING.sub("", found.text))


def marked(text: str, answer: str, finished: bool) -> bool:
    """The text ends with a line `#### ANSWER`, as GSM8K's solutions do, and has no other such mark.

    >>> marked("1 + 1 = 2\\n#### 2", "", True), marked("#### 2 and so on\\nmore", "", True), marked("2", "", True)
    (True, False, False)
    """
    before, _, last = text.strip().rpartition("\n")
    return finished and "####" not in before and re.fullmatch(r"####(?!#)(?!.*####)\s*\S.*", last) is not None


def think_answer(text: str, answer: str, finished: bool) -> bool:
    """The text is `<think>…</think>` and then `<answer>…</answer>`, once each, neither empty, nothing around them.

    >>> think_answer("<think>1+1</think>\\n<answer>2</answer>", "", True), think_answer("<answer>2</answer>", "", True)
    (True, False)
    """
    tags = re.findall(r"</?(?:think|answer)>", text)
    if not finished or tags != ["<think>", "</think>", "<answer>", "</answer>"]:
        return False
    around, thought, between, said, after = re.split(r"</?(?:think|answer)>", text)
    return bool(thought.strip() and said.strip()) and not (around + between + after).strip()


GRADERS: dict[str, Grader] = {
    "exact": exact, "verbatim": verbatim, "number": number, "countdown": countdown, "boxed": boxed, "marked": marked,
    "think_answer": think_answer,
}  # fmt: skip
JUDGED = ("math", "gym")
"""Graders that run in separate processes (`mathematics.py`, `gym.py`)."""
COMPARING = frozenset(("exact", "verbatim", "number", "countdown", "math"))
"""Graders that use the answer column. The others check the form, or know the answer themselves."""


def is_grader(name: str) -> bool:
    return name in GRADERS or name in JUDGED


def answer_of(value: object, graders: frozenset[str]) -> str:
    """Return a column's value as text to compare with; refuse a value that these graders cannot use."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SoleraError(f"is {kind_of(value)}, but must be text or a number")
    if "number" in graders and answer_number(str(value)) is None:
        raise SoleraError(f"is {str(value)[:80]!r}, which holds no number")
    if "countdown" in graders and countdown_problem(str(value)) is None:
        raise SoleraError(f"is {str(value)[:80]!r}, but for countdown it must be like '3 5 7 = 26'")
    return str(value)
