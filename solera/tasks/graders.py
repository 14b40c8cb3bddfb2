"""The graders that come with Solera: plain functions of the text written and the answer wanted.

`finished` is False where the response was cut off by the length limit.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from solera.errors import SoleraError

Grader = Callable[[str, str, bool], bool]

LONGEST_NUMBER = 400
"""Characters; nothing longer is read as a number, so that megabytes of digits cost nothing."""

_NUMBER = re.compile(
    r"""(?: (?<![\w)\]}.]) (?P<sign>[-+−]) )?+     # 5-3 ends in 3, not in -3
        [$€£¥]?+ (?P<inner>(?<=[$€£¥])[-−])?+       # $-5 as well as -$5
        (?P<value> (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]++ ) (?:\.[0-9]++)?+ | \.[0-9]++ )
        (?: [eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9A-Za-z]) )?+
        (?: [ ]?/[ ]?(?P<divisor>[0-9]++) )?+""",
    re.VERBOSE,
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,100})\}\{([^{}]{1,100})\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac ?([0-9])([0-9])(?![0-9])")
_MIXED_NUMBER = re.compile(r"([0-9]{1,20}) ?\\[dt]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}")
_BOXED = "\\boxed{"
_MARK = "####"


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


GRADERS: dict[str, Grader] = {"exact": exact, "verbatim": verbatim, "number": number}


def final_number(text: str) -> tuple[Fraction | None, bool]:
    r"""The number a text comes to, and whether what follows it shows that it is complete.

    That is the last one inside the last `\boxed{…}`, else the first after the last `####`, else the last of all.

    >>> final_number(r"\boxed{\frac{3}{4}} in 2 steps"), final_number("1+1=2 #### 2 apples, 3 pears")[0]
    ((Fraction(3, 4), True), Fraction(2, 1))
    """
    text = _MIXED_NUMBER.sub(_improper, _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    text = _LATEX_FRACTION.sub(r"\1/\2", text)
    boxed = text.rfind(_BOXED)
    if boxed >= 0:
        inside = _braces(text, boxed + len(_BOXED))
        return _last(inside)[0], len(inside) < len(text) - boxed - len(_BOXED)
    _, marked, after = text.rpartition(_MARK)
    if marked:
        match = _NUMBER.search(after)
        return (_value(match), _is_whole(match)) if match else (None, False)
    return _last(text)


def _improper(mixed: re.Match[str]) -> str:
    r"""`1\frac{1}{2}` is 3/2."""
    whole, part, divisor = (int(number) for number in mixed.groups())
    return f"{whole * divisor + part}/{divisor}"


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
    return -size if (match["sign"] or match["inner"] or "+") in "-−" else size


def _braces(text: str, start: int) -> str:
    """From `start` to the brace that closes what was opened before it; the rest of the text where none does."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return text[start:]


def answer_of(value: object, graders: frozenset[str]) -> str:
    """A column's value as the text to compare with; refused where these graders cannot use it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SoleraError(f"is {type(value).__name__}, but must be text or a number")
    if "number" in graders and answer_number(str(value)) is None:
        raise SoleraError(f"is {str(value)[:80]!r}, which holds no number")
    return str(value)
