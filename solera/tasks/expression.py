"""Grader of countdown: an expression of the given numbers that equals the target."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from solera.tasks.final import final_answer

LONGEST = 200
"""Longest expression that is read, in characters, so that no text takes long."""
_SIGNS = str.maketrans("×·⋅∗∙÷⁄∕／＊＋－−–[]{}（）＝", "*****////*+---()()()=")
_SPELLINGS = (
    (r"\\(?:times|cdot|ast)", "*"), (r"\\div", "/"), (r"\\(?:left|right|q?quad|[,;:! ()[\]])|\\?\$", ""),
    (r"(?<=[0-9)]) ?x ?(?=[0-9(])", "*"), (r"\\text\{([^{}]*)\}", r"\1"),
    (r"\\[dtc]?frac ?([0-9])([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    *[(r"\\[dtc]?frac ?\{([^{}]*)\} ?\{([^{}]*)\}", r"((\1)/(\2))")] * 3,  # the innermost first
)  # fmt: skip
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def countdown(text: str, answer: str, finished: bool) -> bool:
    """Whether the expression at the end of the text equals the target and uses each number of the answer column
    `NUMBERS = TARGET` exactly once, with + − × ÷ and brackets.

    >>> [countdown(text, "3 5 7 = 26", True) for text in ("<answer>3 * 7 + 5</answer>", "7×3+5 = 26", "21 + 5")]
    [True, True, False]
    """
    problem, final = countdown_problem(answer), final_answer(text.strip("`\n\t\r "))
    if problem is None or not (finished or final.complete):
        return False
    lines = final.text.strip().splitlines()
    value, used = evaluated(lines[-1], problem[1]) if lines else (None, [])
    return value == problem[1] and sorted(used) == problem[0]


@lru_cache(maxsize=4096)
def countdown_problem(answer: str) -> tuple[list[int], Fraction] | None:
    """Parse numbers and target of `3 5 7 = 26`."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:[ ,]+[0-9]{1,9}){0,19})\s*=\s*(-?[0-9]{1,9})\s*", answer)
    return (sorted(map(int, re.findall("[0-9]+", match[1]))), Fraction(match[2])) if match else None


def evaluated(line: str, target: Fraction) -> tuple[Fraction | None, list[int]]:
    """Return the value of an expression and its numbers. `= target` may stand on either side.

    >>> evaluated("26 = (3*7)+5.", Fraction(26))
    (Fraction(26, 1), [3, 7, 5])
    """
    if len(line) > LONGEST:
        return None, []
    for spelling, plain in _SPELLINGS:
        line = re.sub(spelling, plain, line)
    line = line.translate(_SIGNS)
    sides = [side.strip() for side in line.strip(" .*`").split("=")]
    if len(sides) == 2:
        sides = [side for side in sides if side != str(target)] or sides[:1]
    if len(sides) != 1 or not re.fullmatch(r"[0-9+\-*/() ]+", sides[0]):
        return None, []
    used: list[int] = []
    try:
        return _value(ast.parse(sides[0], mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None, []


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")
