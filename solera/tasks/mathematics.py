"""The grader `math`: whether two mathematical expressions are equal, by math-verify, in a process of its own."""

import re
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from solera.tasks.final import final_answer
from solera.tasks.judges import NoVerdictError, judges

LONGEST = 1000
"""Characters of an expression; no answer is longer."""
TAIL = 2000
"""Characters at the end of a text in which an answer is looked for that nothing points to."""

_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "÷": "\\div ", "·": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ",
    "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∅": "\\emptyset ", "€": "", "£": "", "¥": ""
})  # fmt: skip
_SPELLINGS = tuple(
    (re.compile(spelling), latex)
    for spelling, latex in (
        (r"√ ?\(?([0-9A-Za-z]+)\)?", r"\\sqrt{\1}"),
        (r"(?<![0-9.])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),
        (r"(?<=[0-9])[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z])", r"\\times 10^{\1}"),
        ("~", " "),
        (r"\\varnothing", r"\\emptyset"),
        (r"(?i)\\text ?\{\s*(?:the )?(?:final )?answer(?: is)?:?\s*\}", ""),
    )
)
"""What people write and math-verify does not read, or reads otherwise, as LaTeX."""


async def math(text: str, answer: object, finished: bool) -> bool:
    """What the text states as its answer is equal to the answer, as mathematics or as words."""
    final, wanted = final_answer(text), final_answer(str(answer), phrases=False).text
    somewhere = final.by == "whole"
    if not (finished or final.complete) or (len(final.text) > LONGEST and not somewhere):
        return False
    if len(final.text) <= LONGEST and words(final.text) == words(wanted):
        return True
    try:
        return await judges(__name__, "math").judge("equal", final.text[-TAIL:], somewhere, wanted)
    except NoVerdictError:
        return False


def words(expression: str) -> str:
    r"""What is left of an expression without layout, for answers that are words or stand there character for character.

    >>> words(r"$\text{ Monday}$."), words(r"\left( \frac{1}{2}, 3\right)")
    ('monday', '(\\frac{1}{2},3)')
    """
    plain = re.sub(r"\\(?:left|right|displaystyle|[,;!: ])|\\?\$|\*\*", "", expression)
    plain = re.sub(r"\\(?:text|textbf|mathrm|textit|mbox)\s?\{([^{}]{0,200})\}", r"\1", plain)
    plain = "".join(plain.split()).rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return plain.casefold() if re.fullmatch(r"[A-Za-z]{2,}", plain) else plain


def prepare() -> None:
    """Import the package and let it make its tables, before the clock of the first question runs."""
    import math_verify

    math_verify.verify(math_verify.parse(r"\boxed{1}"), math_verify.parse(r"\boxed{\frac{2}{2}}"))


def equal(expression: str, is_text: bool, answer: str) -> bool:
    """Whether math-verify finds the two equal; of a text it looks for the expression itself."""
    from math_verify import verify

    found = _parsed(as_latex(expression) if is_text else _in_a_box(expression))
    same = verify(_gold(answer), found, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(found) and bool(same)


def as_latex(expression: str) -> str:
    r"""Signs and spellings as LaTeX has them.

    >>> as_latex("3½ × x²"), as_latex("1.5e3 ≥ √2")
    ('3\\frac{1}{2} \\times  x^{2}', '1.5\\times 10^{3} \\ge  \\sqrt{2}')
    """
    if not expression.isascii():
        expression = re.sub(
            "[¼½¾⅐-⅞]", lambda part: rf"\frac{{{normalize('NFKC', part[0]).replace('⁄', '}{')}}}", expression
        )
        expression = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda raised: f"^{{{normalize('NFKC', raised[0])}}}", expression)
        expression = expression.translate(_SIGNS)
    for spelling, latex in _SPELLINGS:
        expression = spelling.sub(latex, expression)
    return expression


@lru_cache(maxsize=4096)
def _gold(answer: str) -> Any:
    return _parsed(_in_a_box(answer))


def _in_a_box(expression: str) -> str:
    return rf"\boxed{{{as_latex(expression).strip().strip('$').rstrip('.')}}}"


def _parsed(text: str) -> Any:
    from math_verify import parse

    return parse(text, parsing_timeout=None)
