"""The graders that come with Solera: plain functions of the text written and the answer wanted.

`finished` is False where the response was cut off by the length limit.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from solera.errors import SoleraError
from solera.tasks.expression import countdown, countdown_problem
from solera.tasks.final import READ, boxed_answer, final_answer

Grader = Callable[[str, str, bool], bool]

LONGEST_NUMBER = 400
"""Characters; nothing longer is read as a number, so that megabytes of digits cost nothing."""

_NUMBER = re.compile(
    r"""(?: (?<![\w)\]}.]) (?P<sign>[-+−–]) )?+    # 5-3 ends in 3, not in -3
        [$€£¥]?+ (?P<inner>(?<=[$€£¥])[-−–])?+      # $-5 as well as -$5
        (?P<value> (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]++ ) (?:\.[0-9]++)?+ | \.[0-9]++ )
        (?: [eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9A-Za-z]) )?+
        (?: [ ]?/[ ]?(?P<divisor>[0-9]++) )?+""",
    re.VERBOSE,
)
_SPELLINGS = (
    (re.compile(r"\\(?=[$%])"), ""),
    (re.compile(r"(?<=[0-9])(?:\\[,!]|\{,\}|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"), ","),  # 1\,000 and 1{,}000
    (re.compile(r" ?(?:\\times|\\cdot|[×·*]) ?10\^(?:\{([-+]?[0-9]{1,3})\}|([0-9]{1,3}))"), r"e\1\2"),
    (re.compile(r"\\[dt]?frac ?([0-9])([0-9])(?![0-9])"), r"\\frac{\1}{\2}"),
)
"""Ways to write a number that are put into one before it is read."""
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,100})\}\{([^{}]{1,100})\}")
_MIXED_NUMBER = re.compile(
    r"(?<![0-9.,/])([0-9]{1,20})(?: ?\\[dt]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}"
    r"| ([0-9]{1,20})/([0-9]{1,20})(?![0-9/]))"
)


def verbatim(text: str, answer: str, finished: bool) -> bool:
    """The text is the answer, character for character, and then ends."""
    return finished and text == answer


def exact(text: str, answer: str, finished: bool) -> bool:
    """The text is the answer, white space around either aside, and then ends.

    >>> exact(" 82\\n", "82", True), exact("82", "82", False)
    (True, False)
    """
    return finished and text.strip() == answer.strip()


def number(text: str, answer: str, finished: bool) -> bool:
    """The number that the text comes to is the answer's. One at the very end of a text cut off may not be complete.

    >>> number("so it costs $1,234.50.", "1234.5", True), number("3/4", "0.75", True), number("It is 42", "42", False)
    (True, True, False)
    """
    found, whole = final_number(text)
    return found is not None and (finished or whole) and found == answer_number(answer)


def boxed(text: str, answer: str, finished: bool) -> bool:
    r"""The text has its answer in a `\boxed{…}`, whatever that is.

    >>> boxed(r"so \boxed{\frac{1}{2}}", "", True), boxed(r"\boxed{}", "", True), boxed(r"\boxed{4", "", True)
    (True, False, False)
    """
    found = boxed_answer(text)
    return found is not None and found.complete and bool(found.text.strip())


def marked(text: str, answer: str, finished: bool) -> bool:
    """The text ends with a line `#### ANSWER`, as GSM8K's solutions do, and has no other such mark.

    >>> marked("1 + 1 = 2\\n#### 2", "", True), marked("#### 2 and so on\\nmore", "", True), marked("2", "", True)
    (True, False, False)
    """
    before, mark, after = text.strip().partition("####")
    at_line_start = not before or before.endswith("\n")
    return finished and bool(mark) and at_line_start and bool(after.strip()) and not re.search(r"\n|####", after)


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
"""Graders that run in processes of their own (`mathematics.py`, `gym.py`)."""
COMPARING = frozenset(("exact", "verbatim", "number", "countdown", "math"))
"""Those that look at the answer column; the others are about form, or know the answer themselves."""


def is_grader(name: str) -> bool:
    return name in GRADERS or name in JUDGED


def final_number(text: str) -> tuple[Fraction | None, bool]:
    r"""The number a text comes to, and whether what follows it shows that it is complete.

    That is the last one inside the last `\boxed{…}`; else, in what `final_answer` takes for the statement of the
    answer, the first, or where an equation stands there the first after its last `=`; else the last of all.

    >>> final_number(r"\boxed{\frac{3}{4}} in 2 steps"), final_number("1+1=2 #### 2 apples, 3 pears")[0]
    ((Fraction(3, 4), True), Fraction(2, 1))
    """
    final = final_answer(text)
    if final.by in ("boxed", "tag"):
        return _last(_plain(final.text))[0], final.complete
    if final.by != "whole":
        statement = _plain(final.text)
        match = _NUMBER.search(statement.rpartition("=")[2]) or _NUMBER.search(statement)
        if match or final.by == "mark":
            return (_value(match), final.complete or _is_whole(match)) if match else (None, False)
    return _last(_plain(text[-READ:]))


def _plain(text: str) -> str:
    for spelling, plain in _SPELLINGS:
        text = spelling.sub(plain, text)
    return _LATEX_FRACTION.sub(r"\1/\2", _MIXED_NUMBER.sub(_improper, text))


def _improper(mixed: re.Match[str]) -> str:
    r"""`1\frac{1}{2}` and `1 1/2` are 3/2; `3 4/2` are two numbers."""
    whole, part, divisor = (int(number) for number in mixed.groups() if number is not None)
    return f"{whole * divisor + part}/{divisor}" if part < divisor else mixed[0]


@lru_cache(maxsize=4096)
def answer_number(answer: str) -> Fraction | None:
    """The number an answer stands for: asked once for every response to a problem."""
    return final_number(answer)[0]


def _last(text: str) -> tuple[Fraction | None, bool]:
    match = None
    for match in _NUMBER.finditer(text):  # noqa: B007
        pass
    return (_value(match), _is_whole(match)) if match else (None, False)


def _is_whole(match: re.Match[str]) -> bool:
    """Whether no further digits could belong to it: `42.` may become 42.5."""
    return bool(match.string[match.end() : match.end() + LONGEST_NUMBER].strip(" .,/"))


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > LONGEST_NUMBER:
        return None
    divisor = int(match["divisor"] or 1)
    if divisor == 0:
        return None
    size = Fraction(match["value"].replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0) / divisor
    return -size if (match["sign"] or match["inner"] or "+") in "-−–" else size


def answer_of(value: object, graders: frozenset[str]) -> str:
    """A column's value as the text to compare with; refused where these graders cannot use it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SoleraError(f"is {type(value).__name__}, but must be text or a number")
    if "number" in graders and answer_number(str(value)) is None:
        raise SoleraError(f"is {str(value)[:80]!r}, which holds no number")
    if "countdown" in graders and countdown_problem(str(value)) is None:
        raise SoleraError(f"is {str(value)[:80]!r}, but for countdown it must be like '3 5 7 = 26'")
    return str(value)
