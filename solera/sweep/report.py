"""The report of a sweep: `report.html`, `report.md`, `curves.png` and, with all numbers, `results.json`."""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from solera.errors import counted
from solera.folder.files import write_whole
from solera.folder.paths import REPORT
from solera.sweep.blocks import Block, Charts, Heading, Link, Paragraph, Quoted, Table, markdown, page
from solera.sweep.curves import as_png, charts, draw
from solera.sweep.plan import Cell, Plan
from solera.sweep.results import SURE, Comparison, Results, Spread


@dataclass(frozen=True)
class Column:
    """How the tables show a measure: its heading, what it means, factor, digits and unit."""

    head: str
    meaning: str
    factor: float = 100
    digits: int = 1
    unit: str = " %"


COLUMNS = {
    "final": Column("final", "held-out accuracy of the last weights"),
    "best": Column("best", "held-out accuracy of the best evaluation"),
    "mean": Column("mean", "held-out accuracy, averaged over all evaluations"),
    "wobble": Column(
        "wobble", "standard deviation of the accuracy over the last third of a run's evaluations, in percentage points",
        digits=2, unit="",
    ),
    "clipped": Column("clipped", "share of the tokens with a non-zero advantage whose gradient the clip removed"),
    "syncs": Column("syncs", "number of times the engine received new weights", factor=1, unit=""),
    "seconds": Column(
        "s per batch", "seconds per batch without evaluations; depends on what else the machine was doing",
        factor=1, digits=3, unit="",
    ),
}  # fmt: skip
MEASURE_WORDS = {
    "final": "accuracy of the last weights",
    "best": "best accuracy of all evaluations",
    "mean": "mean accuracy over all evaluations",
}
MOST_LINES = 40
"""Most cells that the terminal shows."""
FEW = {
    1: "there is no spread to judge by",
    2: "a difference is significant only if it is 9 times its standard deviation over seeds",
}
"""Numbers of seeds that are too few to compare cells, and why. With 2 seeds, the 95 % quantile t(1) is 12.7, and
12.7/√2 is 9."""


def write(results: Results) -> Path:
    """Write all four files to the sweep's folder. Returns the path of the page."""
    folder, title = results.plan.folder, results.plan.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curves.png").write_bytes(as_png(draw(results)))
    content = blocks(results)
    write_whole(folder / "results.json", json.dumps(results.as_json(), indent=1, allow_nan=False) + "\n")
    write_whole(folder / "report.md", markdown(title, content))
    return write_whole(folder / "report.html", page(title, content))


def blocks(results: Results) -> list[Block]:
    plan = results.plan
    says = "Held-out accuracy over steps: mean over seeds, band from the lowest to the highest seed"
    return [
        Paragraph(
            f"{state_words(results)} Seeds {', '.join(map(str, plan.seeds))}. {time.strftime('%Y-%m-%d %H:%M')}."
        ),
        *_failed(results),
        Heading("Best first"),
        Paragraph(
            f"Cells are ordered by the {MEASURE_WORDS[plan.measure]}. Each number is a mean ± standard deviation over "
            "the seeds. All accuracies are on held-out problems."
        ),
        *(block for title, cells in plan.panels().items() for block in _panel(results, title, cells)),
        Paragraph("The columns mean:"),
        Table(("column", "meaning"), [(column.head, column.meaning) for column in COLUMNS.values()], 2),
        *_compared(results),
        *_gained(results),
        Heading("Curves"),
        Paragraph(f"{says}."),
        Charts("curves.png", says, charts(results)),
        Heading("Runs"),
        Table(("run", "state", "final", "best"), [_run_row(results, i) for i in range(len(results.runs))], 2),
        Heading("The sweep's file"),
        Quoted(plan.text),
    ]


def state_words(results: Results) -> str:
    """How many runs there are, how many did not finish, and whether comparisons can be trusted."""
    counts = Counter[str](result.state for result in results.runs)
    words = {"failed": "failed", "unfinished": "stopped before the end", "new": "not started"}
    others = [f"{counts[state]} {does}" for state, does in words.items() if counts[state]]
    told = "; ".join([f"{counts['finished']} of {counted(len(results.runs), 'run')} finished", *others]) + "."
    if 1 < counts["finished"] < len(results.runs):
        told += " Comparisons may change until all are finished."
    seeds = len(results.plan.seeds)
    if seeds not in FEW:
        return told
    return f"{told} {counted(seeds, 'seed')} can show that the cells run, but not which is better: {FEW[seeds]}."


def summary(results: Results) -> list[str]:
    """For the terminal: one line for each cell with a finished run, in the order of the report's tables, with its
    accuracy and its difference from its baseline."""
    measure, compared = results.plan.measure, {one.cell: one for one in results.comparisons()}
    cells = [cell for panel in results.plan.panels().values() for cell in results.ranked(panel) if results.of(cell)]
    if not cells:
        return []
    shown = cells[:MOST_LINES]
    figures = [_figure(COLUMNS[measure], results.spread(cell, measure)) for cell in shown]
    wide, right = max(len(cell.name) for cell in shown), max(map(len, figures))
    head = f"{MEASURE_WORDS[measure]}, mean ± standard deviation over seeds; difference from the baseline in points"
    said = [_difference(compared.get(cell)) or _role(results.plan, cell) for cell in shown]
    lines = [
        f"{cell.name:{wide}}  {figure:>{right}}  {words}".rstrip()
        for cell, figure, words in zip(shown, figures, said, strict=True)
    ]
    more = [f"and {counted(len(cells) - len(shown), 'more cell')} in the report"] if len(cells) > len(shown) else []
    return [f"{head[0].upper()}{head[1:]}:", *lines, *more]


def _role(plan: Plan, cell: Cell) -> str:
    return "baseline" if cell in map(plan.counterpart, plan.cells) else ""


def _difference(one: Comparison | None) -> str:
    if one is None:
        return ""
    _, _, verdict, mean, interval, _, _ = _comparison_row(one)
    return f"{mean}{'' if interval == '–' else f' ({interval})'}, {verdict}"


def _failed(results: Results) -> list[Block]:
    failed = [(one.run.name, one.failure or "") for one in results.runs if one.state == "failed"]
    if not failed:
        return []
    return [Heading("Failed runs"), Table(("run", "last output"), [*failed], 2)]


def _panel(results: Results, title: str, cells: list[Cell]) -> list[Block]:
    """The table of one combination of conditions, the best cell first."""
    head = (next(iter(results.plan.axes)), *(column.head for column in COLUMNS.values()), "seeds")
    rows = [_cell_row(results, cell) for cell in results.ranked(cells)]
    alone = len(results.plan.axes) == 1
    return [*([] if alone else [Heading(title, 3)]), Table(head, [*rows])]


def _cell_row(results: Results, cell: Cell) -> tuple[str, ...]:
    figures = [_figure(column, results.spread(cell, name)) for name, column in COLUMNS.items()]
    return (cell.compared, *figures, f"{len(results.of(cell))} of {len(results.plan.seeds)}")


def _figure(column: Column, value: Spread | None) -> str:
    if value is None:
        return "–"
    mean, deviation = (
        None if figure is None else f"{column.factor * figure:.{column.digits}f}"
        for figure in (value.mean, value.deviation)
    )
    return f"{mean}{'' if deviation is None else f' ± {deviation}'}{column.unit}"


def _compared(results: Results) -> list[Block]:
    comparisons = results.comparisons()
    if not comparisons:
        return []
    tested = sum(one.corrected_p is not None for one in comparisons)
    baseline = ", ".join(f"{axis} {choice}" for axis, choice in results.plan.baseline.items())
    return [
        Heading(f"Against {baseline}"),
        Paragraph(
            "This table compares each cell with its baseline, seed by seed, by the "
            f"{MEASURE_WORDS[results.plan.measure]}. It shows the mean difference in percentage points with its 95 % "
            "interval (Student's t over seeds), and on how many seeds the cell was higher and lower. The two-sided "
            f"p-values are corrected by Holm's method over the {tested} comparisons that have one. A cell is called "
            f"higher or lower if its corrected p-value is below {SURE}."
        ),
        Table(
            ("cell", "against", "verdict", "difference", "95 % interval", "higher / lower", "p (Holm)"),
            [_comparison_row(one) for one in comparisons], 3,
        ),
    ]  # fmt: skip


def _gained(results: Results) -> list[Block]:
    gains = results.gains()
    if not gains:
        return []
    rows = [
        (cell, f"{gain.alone:.3f}", f"{gain.beside:.3f}", f"{gain.active:.1f}", f"{gain.factor:.2f}")
        for cell, gain in gains.items()
    ]
    return [
        Heading("Side by side"),
        Paragraph(
            "Median seconds per batch of runs that were alone and of runs that shared the machine, and how many times "
            "as many batches per second all runs together learned from."
        ),
        Table(("cell", "s per batch, alone", "s per batch, shared", "active runs", "gain"), [*rows]),
    ]


def _comparison_row(one: Comparison) -> tuple[str, ...]:
    d = one.difference
    interval = "–" if d.low is None or d.high is None else f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
    p = "–" if one.corrected_p is None else "below 0.001" if one.corrected_p < 0.001 else f"{one.corrected_p:.3f}"
    signs = f"{d.higher} / {d.lower} of {d.seeds}"
    return (one.cell.name, one.against.name, one.verdict, f"{100 * d.mean:+.1f}", interval, signs, p)


def _run_row(results: Results, place: int) -> tuple[str | Link, ...]:
    result = results.runs[place]
    name, measures = result.run.name, result.measures
    if measures is None:
        return (name, result.state, "–", "–")
    here = (result.run.folder / REPORT).is_file()  # not if the run was made on another machine, or without a page
    link = Link(name, f"runs/{name}/{REPORT}") if here else name
    return (link, result.state, f"{100 * measures.final:.1f} %", f"{100 * measures.best:.1f} %")
