"""Tools that come with Solera: Python in a sandbox, a calculator, and search in a folder of texts."""

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from solera.errors import SoleraError
from solera.tasks.judges import NoVerdictError, judges

LONGEST_OUTPUT = 20_000
LONGEST_EXPRESSION = 500
LARGEST_POWER = 1000
LARGEST_VALUE = 40_000
"""Bits of a numerator or denominator. Longer ones would take long to compute, and no thread runs meanwhile."""
TEXTS = (".txt", ".md", ".rst")
PASSAGES = 3


async def python(code: str) -> str:
    """Run Python code and return what it prints. Each call starts anew. There is no network and no file access.

    Args:
        code: The code to run. The value of the last line is printed.
    """
    try:
        said = await judges("solera.tasks.python_tool", "").judge("runner", (LONGEST_OUTPUT,), (code,), True)
    except NoVerdictError as error:
        raise RuntimeError(f"the code did not finish: {error}") from error
    return str(said)


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b), ast.Mod: operator.mod,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Compute an arithmetic expression with + - * / // % ** and brackets.

    Args:
        expression: The expression, such as (17 + 4) * 23.

    >>> calculator("(17 + 4) * 23"), calculator("2 ** 10 / 3"), calculator("1,200 × 2")
    ('483', '341.333333333333', '2400')
    """
    plain = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", expression).translate(str.maketrans("×·÷−^", "**/-^"))
    if len(plain) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression has more than {LONGEST_EXPRESSION} characters")
    try:
        value = _value(ast.parse(plain.replace("^", "**").strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("this is not an arithmetic expression") from None
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.15g}" if abs(value) < 10**300 else "more than 1e300"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _value(node.left), _value(node.right)
        if abs(power) > LARGEST_POWER or abs(power) * _bits(base) > LARGEST_VALUE:
            raise ValueError("the power is too large")
        return base**power.numerator if power.denominator == 1 else Fraction(str(float(base) ** float(power)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        if _bits(value) > LARGEST_VALUE:
            raise ValueError("the numbers are too long")
        return value
    raise ValueError(f"{ast.unparse(node)} is not a number or an operation")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def folder_search(folder: str | Path, passages: int = PASSAGES) -> Callable[[str], str]:
    """A tool `search` over the paragraphs of all text files in a folder (.txt, .md, .rst)."""
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix in TEXTS and path.is_file())
    found = [
        (path.relative_to(folder).as_posix(), " ".join(paragraph.split()))
        for path in files
        for paragraph in re.split(r"\n\s*\n", path.read_text("utf-8", "replace"))
        if paragraph.strip()
    ]
    if not found:
        raise SoleraError(f"{folder}: the folder has no text to search ({', '.join(TEXTS)})")
    counts = [Counter(_words(text)) for _, text in found]
    spread = Counter(word for count in counts for word in count)
    mean = sum(map(Counter.total, counts)) / len(counts)

    def search(query: str) -> str:
        """Search the documents and return the passages that fit best.

        Args:
            query: A few words to look for.
        """
        scores = [sum(_score(word, count, spread[word], len(found), mean) for word in set(_words(query)))
                  for count in counts]  # fmt: skip
        best = sorted(range(len(found)), key=lambda place: (-scores[place], place))[:passages]
        chosen = [f"{found[place][0]}: {found[place][1]}" for place in best if scores[place] > 0]
        return "\n\n".join(chosen) or "nothing found"

    return search


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _score(word: str, count: Counter[str], holding: int, passages: int, mean: float) -> float:
    """BM25 with its usual constants, k = 1.2 and b = 0.75."""
    if not count[word]:
        return 0.0
    rarity = math.log(1 + (passages - holding + 0.5) / (holding + 0.5))
    return rarity * count[word] * 2.2 / (count[word] + 1.2 * (0.25 + 0.75 * count.total() / mean))
