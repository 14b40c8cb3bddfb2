"""An evaluation as a table, and its comparisons as sentences."""

import re
from textwrap import fill
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from solera.errors import counted
from solera.evaluate.attempts import Attempts
from solera.evaluate.evaluation import GREEDY, Evaluation, Examined
from solera.evaluate.statistics import Difference, MeanEstimate

BREAKABLE = 24
"""Models' names of at least this length may be wrapped."""


class TableRow(NamedTuple):
    """The numbers of a model, of one task's problems, or of a run's checkpoints."""

    label: str
    cells: tuple[str, ...]
    style: str = ""


def show(evaluation: Evaluation, console: Console) -> None:
    """Print the table, what it leaves out, and each comparison with the first model."""
    for table in tables(evaluation, console.width):
        console.print(table)
    for line in (*ungraded(evaluation), *comparison_lines(evaluation)):
        wrapped = fill(line, console.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        console.print(Text(wrapped), soft_wrap=True)


def tables(evaluation: Evaluation, width: int) -> list[Table]:
    """One table with a row per model or, if that is too wide, as many tables as needed with a column per model."""
    heads, lines = (*shown(evaluation), "truncated", "tokens", "alike"), _lines(evaluation)
    sizes = [max(map(len, column)) for column in zip(heads, *(line.cells for line in lines), strict=True)]
    label = min(BREAKABLE, max(len(line.label) for line in lines))
    if _width(label, *sizes) <= width:
        result = [_rows(heads, lines, width - _width(*sizes) - 3)]
    else:
        named, size = max(map(len, heads)), max(len(cell) for line in lines for cell in line.cells)
        together = max(1, (width - _width(named)) // (_width(size) - 1))
        result = [_columns(heads, lines[i : i + together], size) for i in range(0, len(lines), together)]
    problems = counted(len(evaluation.models[0].greedy.problems), "held-out problem")
    result[-1].caption = f"{problems}; 95 % intervals in brackets; alike: the share of the most frequent response"
    return result


def _width(*columns: int) -> int:
    """Width of a table with these column widths: a space on either side of each, and lines between."""
    return sum(columns) + 3 * len(columns) + 1


def broken(label: str, width: int) -> str:
    """Break a name into lines of at most `width` characters, if possible after a slash or at a space.

    >>> broken("runs/demo/checkpoints/step-000100", 17)
    'runs/demo/\\ncheckpoints/\\nstep-000100'
    """
    lines = [""]
    for piece in re.findall(r"[^/ ]*[/ ]?", label):
        if lines[-1].strip() and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _rows(heads: tuple[str, ...], lines: list[TableRow], room: int) -> Table:
    table = Table()
    table.add_column("model", overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(Text(broken(line.label, room)), *line.cells, style=line.style)
    return table


def _columns(heads: tuple[str, ...], lines: list[TableRow], size: int) -> Table:
    table = Table()
    table.add_column("")
    for line in lines:
        table.add_column(
            Text(broken(line.label.strip(), size)), justify="right", overflow="fold", width=size, style=line.style
        )
    for head, *cells in zip(heads, *(line.cells for line in lines), strict=True):
        table.add_row(head, *cells)
    return table


def _lines(evaluation: Evaluation) -> list[TableRow]:
    quantities, lines = shown(evaluation), list[TableRow]()
    for model in evaluation.models:
        estimates, tasks = model.estimates(), model.tasks()
        lines.append(TableRow(model.name, (*(_cell(name, estimates[name]) for name in quantities), *_lengths(model))))
        for task, part in tasks.items() if len(tasks) > 1 else ():
            own = part.estimates()
            label = f"  {task} ({counted(len(part.greedy.problems), 'problem')})"
            lines.append(TableRow(label, (*(_cell(name, own[name]) for name in quantities), "", "", ""), "dim"))
    for run, extremes in evaluation.over_checkpoints().items():
        count = sum(model.candidate.run == run for model in evaluation.models)
        for word in ("max", "mean"):
            cells = [_number(name, getattr(extremes[name], word)) if name in extremes else "–" for name in quantities]
            lines.append(TableRow(f"{word} over {counted(count, 'checkpoint')} of {run}", (*cells, "", "", ""), "dim"))
    return lines


def shown(evaluation: Evaluation) -> list[str]:
    """Return the quantities that get a column. Mean rewards get one only if they differ from the share that passed."""
    names = []
    for name in evaluation.models[0].quantities():
        if not name.startswith("reward") or any(_graded_finely(model, name) for model in evaluation.models):
            names.append(name)
    return names


def _graded_finely(model: Examined, name: str) -> bool:
    attempts = model.greedy if name == "reward greedy" else model.sampled
    return attempts is not None and attempts.reward_P() != attempts.rate_P()


def ungraded(evaluation: Evaluation) -> list[str]:
    """How many attempts are not counted, if any."""
    lines = []
    for model in evaluation.models:
        if count := sum(attempts.ungraded for attempts in _kinds(model)):
            lines.append(f"{model.name}: {counted(count, 'attempt')} without a reward: not counted")
    return lines


def comparison_lines(evaluation: Evaluation) -> list[str]:
    """One paragraph per further model, one line per quantity."""
    first, lines = evaluation.models[0].name, list[str]()
    for model, differences in evaluation.comparisons():
        lines.append(f"{model.name} against {first}, problem by problem:")
        for name in shown(evaluation):
            if (difference := differences[name]) is not None:
                lines.append(f"  {name}: {_sentence(name, difference, first, model.name)}")
    return lines


def _sentence(name: str, difference: Difference, first: str, second: str) -> str:
    estimate = difference.estimate
    value = _change(name, estimate.value)
    if estimate.problems == 1:
        return f"{value} on one problem: too few for an interval"
    if estimate.low is None or estimate.high is None:
        return f"{value} on each of {estimate.problems} problems: no spread, so no interval"
    word = "higher" if estimate.value > 0 else "lower"
    verdict = f"{word}: the interval excludes 0" if difference.excludes_zero else "undecided: the interval includes 0"
    limits = " to ".join(_change(name, limit).removesuffix(" points") for limit in (estimate.low, estimate.high))
    if name.startswith("reward") or (name.startswith("pass@") and name != GREEDY):  # avg@n has the counts of pass@k
        return f"{value} ({limits}), {verdict}"
    often = "" if name in (GREEDY, "avg@1") else " at least once"
    solved = f"{counted(difference.only_second, 'problem')} solved{often} only by {second}"
    return f"{value} ({limits}), {verdict}; {solved}, {difference.only_first} only by {first}"


def _change(name: str, value: float) -> str:
    """With its sign; shares in percentage points."""
    return f"{value:+.3f}" if name.startswith("reward") else f"{100 * value:+.1f} points"


def _cell(name: str, estimate: MeanEstimate | None) -> str:
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return _number(name, estimate.value)
    low, high = (_number(name, limit).removesuffix("%") for limit in (estimate.low, estimate.high))
    return f"{_number(name, estimate.value)} ({low}–{high})"


def _number(name: str, value: float) -> str:
    return f"{value:.3f}" if name.startswith("reward") else f"{value:.1%}"


def _lengths(model: Examined) -> tuple[str, str, str]:
    """For greedy and, after a slash, sampled attempts: share cut off, tokens, share that equal the most frequent
    one."""
    kinds = _kinds(model)
    truncated, alike = (" / ".join(f"{getattr(a, name):.1%}" for a in kinds) for name in ("truncated", "alike"))
    return truncated, " / ".join(f"{a.length:.1f}" for a in kinds), alike


def _kinds(model: Examined) -> list[Attempts]:
    return [model.greedy] if model.sampled is None else [model.greedy, model.sampled]
