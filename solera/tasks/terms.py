"""Find the quantities in plain text: numbers, and terms of numbers, which are evaluated."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from solera.tasks.spelling import MAGNITUDES

LONGEST_NUMBER = 400
"""Longest number in characters, and largest exponent, so that megabytes of digits do not take long."""
MOST_OPERANDS = 60
LONGEST_GAP = 40

_NUMBER = re.compile(
    r"""(?: (?<![\w)\]}.]) (?P<sign>[-+]) )?+    # 5-3 ends in 3, not in -3
        [$€£¥₹]?+ (?P<inner>(?<=[$€£¥₹])-)?+       # $-5 as well as -$5
        (?<![A-Za-z0-9_^]) (?<![A-Za-zπ√]/)        # not the 2 of CO2, of x_2, of cm^2, of x/2 or of π/2
        (?P<value>
          (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]{1,2}(?:,[0-9]{2}){1,5},[0-9]{3}(?![0-9,])
            | (?<![0-9.,] )[0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9,]|-[A-Za-z]) | [0-9]++ )
          (?:\.[0-9]++)?+ | \.[0-9]++ )
        (?: [eE](?P<exponent>[-+]?[0-9]++)(?![A-Za-z]) )?+
        (?: \^(?P<power>-?[0-9]++) )?+
        (?: [ ]?/[ ]?(?P<divisor>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]++(?:\.[0-9]++)?+) )?+
        (?: (?:[ ]{0,3}|-)(?P<magnitude>
          (?i:hundred|thousand|million|billion|trillion|lakh|crore)s?(?![a-z]) | (?:[kKM]|[mb]n)(?![A-Za-z/&'])) )?+
        (?P<irrational> [ ]?\*?[ ]?[π√] )?+""",
    re.VERBOSE,
)
_BEGIN = re.compile("[0-9.$€£¥₹+-]")
_OPERATION = re.compile(
    r"""[\s)]*(?: %?\s*[A-Za-z]*\s*(?P<words>plus|minus|times|multiplied\ by|divided\ by|added\ to|(?<=%\ )of)
        | (?:[a-z%]+\s)?\s*%?(?P<sign>[+*×÷·/]) | %?(?P<minus>-) | (?P<cross>x(?=\s*[$(]|\s*$))
        | (?P<implied>(?<![\s])(?=\()) )[\s($€£¥₹+-]*""",
    re.VERBOSE,
)
_SIGNS = {
    "×": "*",
    "·": "*",
    "÷": "/",
    "x": "*",
    "plus": "+",
    "minus": "-",
    "times": "*",
    "multiplied by": "*",
    "divided by": "/",
    "added to": "+",
    "of": "*",
}
_CLOCK = (":", " : ", "'", "′")
"""Separators between the numbers of a time, a ratio, or feet and inches."""
_SYMBOL = re.compile("[±√π+×÷*/^·-]")
_SYMBOL_BEFORE = re.compile(r"(?:±\s?|[+×÷]\s?[A-Za-z]+\s|[√π]\s*\(?|(?:\b[B-Zb-z]|[√π])\s*[+*/^×·-]\s*)$")
_SYMBOL_AFTER = re.compile(
    r"\s?[+×÷]\s?[A-Za-z]+\s[$]?[0-9]|\s?±|\)?\s*[-+*×·/^]\s*(?:[B-Zb-z](?![A-Za-z])|[√π])|\s(?:doubled|tripled"
    r"|halved|squared|cubed|factorial)\b"
    r"|\^[\s{(-]*(?:[0-9]|[nxyk]\b)"
)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Quantity:
    """A number or term in a text, and its position."""

    def __init__(self, text: str, numbers: tuple[re.Match[str], ...]) -> None:
        self.text = text
        self.numbers = numbers
        self.start, self.end = numbers[0].start(), numbers[-1].end()
        self.is_term = len(numbers) > 1

    @cached_property
    def value(self) -> Fraction | None:
        """`None` if it is not a single rational number, such as 5:30, 70-74 and 72 + x."""
        before = max(0, self.start - 16)
        if _SYMBOL.search(self.text, before, self.start) and _SYMBOL_BEFORE.search(self.text, before, self.start):
            return None
        if _SYMBOL_AFTER.match(self.text, self.end) or len(self.numbers) > MOST_OPERANDS:
            return None
        return _term(self.text, self.numbers) if self.is_term else value_of(self.numbers[0])


def quantities(text: str) -> list[Quantity]:
    """Find all numbers and terms of a text.

    >>> [str(found.value) for found in quantities("48 + 24 = 72 clips at 5:30 for 2 * (3 + 4) days")]
    ['72', '72', 'None', '14']
    """
    found, group = list[Quantity](), list[re.Match[str]]()
    for number in _numbers(text):
        if group and not _joined(text, group[-1], number):
            found.append(Quantity(text, tuple(group)))
            group = []
        group.append(number)
    if group:
        found.append(Quantity(text, tuple(group)))
    return found


def _numbers(text: str) -> Iterator[re.Match[str]]:
    """Find the numbers of a text. Characters with which a number can begin are searched first: the pattern is slow."""
    place = 0
    while begin := _BEGIN.search(text, place):
        number = _NUMBER.match(text, begin.start())
        place = (number or begin).end()
        if number:
            yield number


def _joined(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    gap = text[one.end() : other.start()]
    if not gap.strip(" "):
        return other["sign"] is not None
    return len(gap) < LONGEST_GAP and (gap in _CLOCK or _OPERATION.fullmatch(gap) is not None)


def _term(text: str, group: tuple[re.Match[str], ...]) -> Fraction | None:
    """The value of a term. Ranges such as 70-74 and times have none."""
    values = [value_of(number) for number in group]
    if len(group) == 2 and group[1]["value"] == "00" and text[group[0].end() : group[1].start()] == ":":
        return values[0]  # 7:00
    gaps = [text[one.end() : other.start()] for one, other in pairwise(group)]
    if None in values or any(gap in _CLOCK for gap in gaps):
        return None
    if len(values) == 2 and gaps == ["-"] and 0 <= values[0] < values[1]:  # type: ignore[operator]
        return None
    names, written = dict[str, Fraction | None](), ""
    for place, (number, value) in enumerate(zip(group, values, strict=True)):
        if place:
            written += _symbols(gaps[place - 1]) or "+" * (number["sign"] == "+" or number["sign"] == "-")
        names[f"n{place}"] = value
        written += f"n{place}"
    depths = list(accumulate({"(": 1, ")": -1}.get(sign, 0) for sign in written))
    missing = max(0, -min(depths))
    if text[max(0, group[0].start() - missing) : group[0].start()] != "(" * missing:
        return None
    written = "(" * missing + written + ")" * (depths[-1] + missing)
    try:
        return _evaluated(ast.parse(written, mode="eval").body, names)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _symbols(gap: str) -> str:
    """The operators and brackets between two numbers."""
    operation = _OPERATION.fullmatch(gap)
    if operation is None:
        return ""
    name = operation["words"] or operation["sign"] or operation["minus"] or operation["cross"] or "*"
    sign = _SIGNS.get(name, name)
    if "%" in gap and sign in "*":
        sign = "/100*"
    place = operation.end(operation.lastgroup or 0)
    behind = re.sub(r"[^(+-]", "", gap[place:])
    return ")" * gap[: operation.start(operation.lastgroup or 0)].count(")") + sign + behind


def _evaluated(node: ast.expr, names: dict[str, Fraction | None]) -> Fraction:
    if isinstance(node, ast.Name):
        value = names[node.id]
        assert value is not None
        return value
    if isinstance(node, ast.Constant) and node.value == 100:
        return Fraction(100)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluated(node.operand, names)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluated(node.left, names), _evaluated(node.right, names))
    raise ValueError(f"{type(node).__name__} is not allowed")


def value_of(match: re.Match[str]) -> Fraction | None:
    sign, inner, value, exponent, power, divisor, magnitude, irrational = match.groups()
    if match.end() - match.start() > LONGEST_NUMBER or irrational:
        return None
    size = Fraction(int(value) if value.isdecimal() else value.replace(",", "").replace(" ", ""))
    if exponent or power or divisor:
        exponent, power, divisor = int(exponent or 0), int(power or 1), Fraction((divisor or "1").replace(",", ""))
        if max(abs(exponent), abs(power) * len(value)) > LONGEST_NUMBER or not divisor or (not size and power < 0):
            return None
        size = (size * Fraction(10) ** exponent) ** power / divisor
    if magnitude:
        size *= MAGNITUDES["million" if magnitude == "M" else magnitude.lower().rstrip("s")]
    return -size if (sign or inner) == "-" else size
