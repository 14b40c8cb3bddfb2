"""Accuracy over steps as small multiples: one panel per combination of conditions, one line per cell."""

import io
from statistics import fmean
from typing import Any

from solera.report.plot import COLOURS, FAINT, INK, Dash, dash
from solera.sweep.plan import Cell
from solera.sweep.results import Results

PALETTE = (*COLOURS, "#b3323c", "#3aa3a0", "#a07d1c", "#5b6773")


def draw(results: Results) -> Any:
    """A matplotlib figure: means over seeds as lines, minimum to maximum as bands, the same scales everywhere."""
    from matplotlib.figure import Figure

    panels = results.plan.panels()
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1.2 + 4 * columns, 0.8 + 2.9 * rows), dpi=130, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    looks = _looks(next(iter(results.plan.axes.values())))
    for axis, (title, cells) in zip(axes, panels.items(), strict=False):
        _style(axis, title)
        for cell in cells:
            _line(axis, results, cell, *looks[cell.compared])
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    _legend(figure, axes)
    return figure


def curve(results: Results, cell: Cell) -> list[tuple[float, float, float, float]]:
    """(step, mean, minimum, maximum) over the finished seeds, at every step at which all of them were evaluated."""
    by_step: dict[float, list[float]] = {}
    runs = results.of(cell)
    for result in runs:
        for step, accuracy in result.curve:
            by_step.setdefault(step, []).append(accuracy)
    return [(step, fmean(a), min(a), max(a)) for step, a in sorted(by_step.items()) if len(a) == len(runs)]


def as_png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def charts(results: Results) -> dict[str, Any]:
    """Return the same curves as data, for the HTML page that draws the charts itself: the compared names, and the
    panels with one line for each name."""
    names = list(next(iter(results.plan.axes.values())))
    panels = [
        {"title": title, "lines": [_plain(names.index(cell.compared), curve(results, cell)) for cell in cells]}
        for title, cells in results.plan.panels().items()
    ]
    return {"names": names, "charts": panels}


def _plain(place: int, points: list[tuple[float, float, float, float]]) -> dict[str, Any]:
    columns = zip(*points, strict=True) if points else ((), (), (), ())
    return {"run": place, **dict(zip(("steps", "values", "low", "high"), map(list, columns), strict=True))}


def _looks(names: tuple[str, ...]) -> dict[str, tuple[str, Dash]]:
    """A colour and a dash for each name, the same in every panel. When colours repeat, the dash differs."""
    return {name: (PALETTE[i % len(PALETTE)], dash(i // len(PALETTE))) for i, name in enumerate(names)}


def _line(axis: Any, results: Results, cell: Cell, colour: str, style: Dash) -> None:
    points = curve(results, cell)
    if points:
        steps, means, lows, highs = zip(*points, strict=True)
        axis.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
        axis.plot(steps, means, color=colour, linestyle=style, linewidth=1.6, label=cell.compared)


def _style(axis: Any, title: str) -> None:
    axis.set_title(title, color=INK, fontsize=10)
    axis.set_xlabel("step", color=INK)
    axis.tick_params(labelbottom=True)  # the row below may be shorter
    if axis.get_subplotspec().is_first_col():
        axis.set_ylabel("held-out accuracy", color=INK)
    axis.set_ylim(0, 1.02)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Any) -> None:
    """One legend for all panels."""
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
