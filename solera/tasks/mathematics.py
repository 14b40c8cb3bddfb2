"""The grader `math`: compares two mathematical expressions with math-verify, in a separate process."""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from math import floor, log10
from typing import Any
from unicodedata import normalize

from solera.tasks.final import affirmed, final_answer
from solera.tasks.judges import NoVerdictError, judges
from solera.tasks.spelling import REPEATING_DECIMAL, repeating

PLACES = 6
"""Decimal places that are compared, such as 0.333333 with a third."""
LONGEST = 1000
"""Longest expression, in characters; no answer is longer."""
HUGE = 1e100
"""Numbers above this are not written out in digits."""
TAIL = 2000
"""Characters at the end of a text that are searched for an answer if nothing marks it."""

_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "÷": "\\div ", "·": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ",
    "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∅": "\\emptyset ", "€": "", "£": "", "¥": ""
})  # fmt: skip
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\s?\{"
_TRIGONOMETRIC, _DEGREES = r"\\(?:sin|cos|tan|cot|sec|csc)", r"([0-9.]+) ?\^\{? ?\\circ ?\}?"
_CHANGING = (
    r"[^{}]*\b(?:and|or|to|by|hundred|thousand|million|billion|trillion|dozen|percent|squared|cubed|factorial|plus"
    r"|minus|times|over|divided|mod|modulo|base|choose|root|sqrt|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|more"
    r"|less|than|with|remainder|pi|infinity|[xyzi])\b"
)
"""Words after a number that change its value."""
_RELATED = r"(?=.*(?:[<>=]|\\[lg]e))(.*?)"
_CHANGES = f"(?!{_CHANGING})"
_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(spelling), latex)
    for spelling, latex in (
        (r"√ ?\(?([0-9A-Za-z]+)\)?", r"\\sqrt{\1}"),
        (r"(?<![0-9.])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),
        (r"(?<=[0-9])[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z])", r"\\times 10^{\1}"),
        ("~", " "),
        (r"(?<=[0-9A-Za-z)}])\*\*([0-9]{1,3})(?![0-9*])", r"^{\1}"),
        (r"\\(?:mathrm|text) ?\{([ei])\}", r" \1 "),
        (r"\*\*|\\(?:boldsymbol|bm|underline|large|Large)(?![A-Za-z])|\\(?:text)?color\{[a-z]+\}|\\\\\s*$", ""),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\[lr]angle(?![A-Za-z])", lambda bracket: "(" if bracket[0] == r"\langle" else ")"),
        (r"\\([lr])brace(?![A-Za-z])", lambda brace: r"\{" if brace[1] == "l" else r"\}"),
        (REPEATING_DECIMAL, repeating),
        (rf"{_TRIGONOMETRIC} ?(?:\\left)?\([^()]*\)", lambda angle: re.sub(_DEGREES, r"\\frac{\1\\pi}{180}", angle[0])),
        (rf"({_TRIGONOMETRIC}) ?{_DEGREES}", r"\1(\\frac{\2\\pi}{180})"),
        # math-verify reads 2(\frac{1}{3}) as 7/3
        (r"(?<=[0-9])(?<!_[0-9]) ?(?=(?:\\left)? ?\( ?\\[dt]?frac)", r" \\cdot "),
        (r"(?i)^(?:about|approximately|around|exactly) ", ""),
        (rf"(?<=[0-9]) {_CHANGES}[A-Za-z]{{3,}}(?: [A-Za-z]{{2,}})*$", ""),
        (r"\\p?mod ?(?:\{ ?[0-9]+ ?\}|[0-9]+)", ""),
        (r"\\equiv(?![A-Za-z])", "="),
        (rf"^{_TEXT}[^{{}}=]{{1,60}}\}} ?=", ""),
        (rf"^{_TEXT}\s*([0-9][0-9.,/]*) {_CHANGES}[A-Za-z ]+\}}$", r"\1"),  # \text{7 apples}
        (rf"(?<=[0-9}})i])(?:[ ~]|\\[,;: ])*{_TEXT}{_CHANGES}[A-Za-z/. ]+\}}(?:\^\{{?[0-9]\}}?)?\s*$", ""),
        (rf"^(?:\\left)?\\\{{ ?[a-z] ?(?:\\in ?\\mathbb ?\{{R\}} ?)?(?:\\mid|:|\|){_RELATED}(?:\\right)?\\\}}$", r"\1"),
        (r"(?i)\\text ?\{\s*(?:the )?(?:final )?answer(?: is)?:?\s*\}", ""),
    )
)
"""Rewrite as LaTeX what people write and math-verify does not read, or misreads."""
_CHOICE = re.compile(
    r"(?i:option |choice )?\(?([A-J])(?:\)(?:$|[\s~]|\\[ ,;:]|\\quad)|[.:]\s|$)"
    rf"(?!\s*(?:[-,&+=*/^<>]|\\(?:cup|cap|times|cdot|to|le|ge|subset)|(?:{_TEXT}\s*)?(?:and|or|not)\b))"
    r"((?:(?!\([A-J]\)).)*)",
    re.DOTALL,
)
_SET, _PAIR = re.compile(r"\\\{(?!.*\\mid)[^()\[\]:|]*\\\}"), re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
_TWO_QUANTITIES = re.compile(
    rf"[0-9]\s*{_TEXT}(?!\s*(?:and|or)\b)[^{{}}]*[A-Za-z][^{{}}]*\}}(?:\\[,;: ]|\s)*[0-9]"  # 3 hours 30 minutes
    r"|(?<!frac )(?<![0-9_^])[0-9.]++(?:\\[,;: ]|\s)+(?:[0-9]{1,2}|[0-9]{4,})(?![0-9/])"  # 1 2, but 1 234
)
_CLOCK = re.compile(r"(?i)([0-9]{1,2})(?::([0-9]{2}))?(?:([ap])\.?m\.?)?")
_LIST = re.compile(r"[^()\[\]{}]*,[^()\[\]{}]*")
_THOUSANDS = re.compile(r"[-$\s]*[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_CHANGED = re.compile(rf"[0-9}}]\s*{_TEXT}(?={_CHANGING})[^{{}}]*\}}$")  # 3\text{ million}
_BASE_OR_MODULUS = re.compile(r"(?<=[0-9])_\{?([0-9]+)|\\p?mod ?\{?([0-9]+)")
_INEQUALITY = re.compile(r"\s*([a-z])\s*(<|>|\\leq?|\\geq?)(?![A-Za-z])([^<>=]+)")
_HALF_LINES = {"<": r"(-\infty,{})", ">": r"({},\infty)", "\\le": r"(-\infty,{}]", "\\ge": r"[{},\infty)"}


async def math(text: str, answer: object, finished: bool) -> bool:
    """The answer stated in the text equals the expected one, as mathematics or as words."""
    final, wanted = final_answer(text), final_answer(str(answer), phrases=False).text
    somewhere = final.by == "whole"
    if somewhere:
        final = final._replace(text=affirmed(final.text))
    if not (finished or final.complete) or (len(final.text) > LONGEST and not somewhere):
        return False
    if len(final.text) <= LONGEST and words(final.text) == words(wanted):
        return True
    try:
        # math-verify parses LaTeX with a grammar. It evaluates only what consists of digits and operators.
        verdict = await judges(__name__, "math").judge("grader", (wanted,), (final.text[-TAIL:], somewhere), False)
    except NoVerdictError:
        return False
    return verdict is True


def words(expression: str) -> str:
    r"""An expression without layout, for answers that are words or match character for character.

    >>> words(r"$\text{ Monday}$."), words(r"\left( \frac{1}{2}, 3\right)")
    ('monday', '(\\frac{1}{2},3)')
    """
    plain = re.sub(r"(?<=[0-9])(?:\\[,;: ]|\s)+(?=(?:[0-9]{1,2}|[0-9]{4,})(?![0-9]))", "&", expression)  # 1 2 is not 12
    plain = re.sub(r"\\(?:left|right|displaystyle|[,;!: ])|\\?\$|(?<![\w)}])\*\*|\*\*(?![\w(\\])", "", plain)
    plain = re.sub(r"\\(?:text|textbf|mathrm|textit|mbox)\s?\{([^{}]{0,200})\}", r"\1", plain)
    plain = "".join(plain.split()).rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return plain.casefold() if re.fullmatch(r"[A-Za-z]{2,}", plain) else plain


def prepare() -> None:
    """Import the package and build its tables before the time of the first question starts."""
    import math_verify

    math_verify.verify(math_verify.parse(r"\boxed{1}"), math_verify.parse(r"\boxed{\frac{2}{2}}"))


def grader(answer: str) -> Callable[[str, bool], bool]:
    """`equal`, with this answer."""
    return partial(equal, answer=answer)


def equal(expression: str, is_text: bool, answer: str) -> bool:
    """Whether math-verify finds the two equal. In a text, it looks for the expression itself."""
    if not is_text:
        (letter, expression), (right_letter, answer) = choice(expression), choice(answer)
        if letter and right_letter:
            return letter == right_letter
        if (same_time := _same_time(expression, answer)) is not None:
            return same_time
        if _misread(expression.strip(), answer.strip()):
            return False
        if (lists := _repeating_lists(expression, answer)) is not None:
            return _same_elements(*lists)
    bases = [_BASE_OR_MODULUS.findall(text) for text in (expression, answer)]
    if all(bases) and bases[0][-1] != bases[1][-1]:
        return False
    found, gold = _parsed(as_latex(expression) if is_text else _in_a_box(expression)), _gold(answer)
    return bool(found) and _is_infinite(found) == _is_infinite(gold) and _verified(gold, found)


def _verified(gold: list[Any], found: list[Any]) -> bool:
    """What math-verify says. sympy tries random numbers, always the same ones here, so that grades can be repeated."""
    from math_verify import verify
    from sympy.core import random

    random.seed(0)
    places = _places([*gold, *found])
    return bool(verify(gold, found, float_rounding=places, timeout_seconds=None, allow_set_relation_comp=True))


def _is_infinite(parsed: list[Any]) -> bool:
    """Whether an expression contains an infinity. A difference with one may be 0 for sympy, if chance wills it."""
    from sympy import Expr, oo, zoo

    return any(isinstance(found, Expr) and found.has(oo, -oo, zoo) for found in parsed)


def _places(parsed: list[Any]) -> int:
    """Number of decimals to compare: more if all numbers are small, so that four significant digits count."""
    from sympy import Basic, Float, Number

    expressions = [found for found in parsed if isinstance(found, Basic)]
    if not any(found.has(Float) for found in expressions):
        return PLACES
    numbers = [number for found in expressions for number in ([found] if found.is_number else found.atoms(Number))]
    sizes = [abs(number.evalf(4)) for number in numbers]
    largest = min(1.0, max((float(size) for size in sizes if size.is_Float), default=1.0))
    return max(PLACES, 4 + floor(-log10(largest))) if largest > 0 else PLACES


def _misread(expression: str, answer: str) -> bool:
    """Whether math-verify would read only part of either, or mistake a set for an interval."""
    expression, answer = (_without_dress(side) for side in (expression, answer))
    sides = (expression, answer), (answer, expression)
    return any(
        _TWO_QUANTITIES.search(one) or _CHANGED.search(one) or (_SET.fullmatch(one) and _PAIR.fullmatch(other))
        for one, other in sides
    )


def _same_time(expression: str, answer: str) -> bool | None:
    """Whether two times of day are equal; `None` if they are not times. One of them may omit AM or PM.

    >>> _same_time(r"\\text{6 PM}", r"\\text{6 AM}"), _same_time("6:30", r"6:30\\text{ p.m.}"), _same_time("6", "7")
    (False, True, None)
    """
    times = [_CLOCK.fullmatch(words(side)) for side in (expression, answer)]
    one, other = times
    if one is None or other is None or not (one[3] or other[3] or (one[2] and other[2])):
        return None
    halves = {half.lower() for half in (one[3], other[3]) if half}
    return int(one[1]) == int(other[1]) and (one[2] or "00") == (other[2] or "00") and len(halves) < 2


def _repeating_lists(expression: str, answer: str) -> tuple[list[str], list[str]] | None:
    """The elements of two lists, if one list contains an element twice: math-verify would compare them as sets."""
    lists = []
    for side in (expression, answer):
        plain = _without_dress(side.strip())
        if not _LIST.fullmatch(plain) or _THOUSANDS.fullmatch(plain):
            return None
        lists.append([element.strip() for element in re.split(r",|\band\b", plain) if element.strip()])
    one, other = lists
    return (one, other) if len(set(one)) < len(one) or len(set(other)) < len(other) else None


def _same_elements(one: list[str], other: list[str]) -> bool:
    """Whether the elements of two lists match one to one."""
    left = list(other)
    for element in one:
        match = next((candidate for candidate in left if equal(element, False, candidate)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _without_dress(expression: str) -> str:
    r"""The set or pair without its surroundings.

    >>> _without_dress(r"$x \in \left\lbrace 1,2\right\rbrace$.")
    '\\{ 1,2\\}'
    """
    plain = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", expression).strip(" $.")
    plain = re.sub(r"\\(?:mathrm|text) ?\{([ei])\}", r"\1", plain)
    plain = re.sub(r"^[A-Za-z]\s*(?:=|\\in(?![A-Za-z]))\s*", "", plain)
    plain = re.sub(r"\\([lr])brace(?![A-Za-z])", lambda brace: r"\{" if brace[1] == "l" else r"\}", plain)
    return re.sub(r"\\([lr])angle(?![A-Za-z])", lambda bracket: "(" if bracket[1] == "l" else ")", plain)


def choice(expression: str) -> tuple[str, str]:
    r"""The letter of a multiple-choice answer, and the text beside it.

    >>> choice(r"\textbf{(B)}\ 12"), choice("(C)"), choice("2C")
    (('B', '12'), ('C', '(C)'), ('', '2C'))
    """
    plain = re.sub(_TEXT + r"([^{}]*)\}", r"\1 ", expression.replace("**", ""), count=1).strip(" $.~")
    labelled = _CHOICE.fullmatch(plain)
    if labelled is None:
        return "", expression
    return labelled[1], re.sub(r"^(?:\\[ ,;:]|\\quad|[\s~])+", "", labelled[2]) or expression


def as_latex(expression: str) -> str:
    r"""Rewrite signs and spellings as LaTeX.

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
    expression = _union(as_latex(expression.strip().strip("$")).strip().rstrip("."))
    return rf"\boxed{{{expression}}}"


def _union(expression: str) -> str:
    """`x<1 or x>2` as intervals; math-verify reads it as a set of two inequalities."""
    parts = [_INEQUALITY.fullmatch(part) for part in re.split(_TEXT + r"\s*or\s*\}|\bor\b", expression)]
    lines = [_HALF_LINES[part[2].replace("eq", "e")].format(part[3].strip()) for part in parts if part]
    of_one = len({part[1] for part in parts if part}) == 1
    return r"\cup".join(lines) if of_one and len(lines) == len(parts) > 1 else expression


def _parsed(text: str) -> Any:
    from math_verify import parse

    return [_decimal(_with_i(found)) for found in parse(text, parsing_timeout=None)]


def _decimal(found: Any) -> Any:
    r"""`1.6\times 10^{-19}` as one number, because math-verify ignores so small a difference. `6.02\times 10^{23}` as a
    whole number, because the nearest float differs from it."""
    from sympy import Expr, Float, Pow, Rational

    if not (isinstance(found, Expr) and found.is_number and found.has(Float) and found.has(Pow)):
        return found
    value = found.evalf()
    if not value.is_Float or abs(value) >= HUGE:
        return found
    whole = found.xreplace({one: Rational(str(one)) for one in found.atoms(Float)})
    return whole if whole.is_Integer else value if abs(value) < 0.001 else found


def _with_i(found: Any) -> Any:
    """Read the letter i as the imaginary unit; math-verify reads it as a variable. Inequalities are left alone."""
    from sympy import Basic, I
    from sympy.core.relational import Relational

    units = [name for name in found.free_symbols if name.name == "i"] if isinstance(found, Basic) else []
    return found.subs(units[0], I) if units and not found.has(Relational) else found
