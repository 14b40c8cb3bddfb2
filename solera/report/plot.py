"""A picture of a run: does it learn, how old is its data, how far off-policy is it, and what does the clip do?"""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solera.folder.files import appearing
from solera.folder.paths import METRICS, PLOT
from solera.report.panels import PANELS, Panel
from solera.report.sinks import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#1f2933", "#d5dbe1"
COLOURS = ("#0067a8", "#cc4f00", "#00815d", "#a63f80")
"""The colours of the page in light mode (page/style.css)."""
SYNC = COLOURS[2]
Dash = tuple[float, tuple[float, ...]] | str
"""A line style of matplotlib."""


def dash(index: int) -> Dash:
    """The dash of the n-th metric of a panel, as on the page (page/charts.js): no two are equal.

    >>> dash(0), dash(1), dash(4)
    ('-', (0, (8, 4)), (0, (9, 3, 2, 3, 2, 3)))
    """
    if index < 3:
        return ("-", (0, (8, 4)), (0, (2, 3)))[index]
    return 0, (9, 3, *(2, 3) * (index - 2))


def plot_run(folder: Path) -> Path:
    """Draw `metrics.jsonl` of a run's folder into its `plot.png`."""
    target = folder / PLOT
    with appearing(target) as unfinished:
        draw(read_metrics(folder / METRICS), folder.name).savefig(unfinished)
    return target


def draw(rows: list[dict[str, float]], name: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), dpi=130)
    # Fixed margins: to find them by drawing everything first takes as long as the picture itself.
    figure.subplots_adjust(left=0.05, right=0.95, top=0.895, bottom=0.075, wspace=0.18, hspace=0.32)
    for axis, panel in zip(figure.subplots(2, 2).flat, (one for one in PANELS if one.pictured), strict=True):
        # A fixed height: to find one, matplotlib would lay out all tick labels again.
        axis.set_title(f"{panel.title} (batches)" if panel.syncs else panel.title, color=INK, y=1)
        _curves(axis, rows, panel, **({"drawstyle": "steps-post"} if panel.stepped else {}))
        if panel.syncs:
            _mark_syncs(axis, rows)
        if axis.lines:
            _style(axis, panel.floor)
        else:  # text from other sources has no age, and its authors' log-probabilities are unknown
            axis.text(0.5, 0.5, "not known in this run", transform=axis.transAxes, ha="center", color=INK)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    figure.suptitle(name, color=INK)
    return figure


def _curves(axis: Any, rows: list[dict[str, float]], panel: Panel, **style: Any) -> None:
    """Draw the curves of a panel. A curve that equals the first one everywhere would be hidden, so the two share a line
    and a label."""
    names = panel.metrics
    first, *others = names
    same = [name for name in others if all(row.get(name) == row.get(first) for row in rows)]
    labels = names | {first: " = ".join([names[first], *(names[name] for name in same)])}
    axes = dict.fromkeys(names, axis) | _right_axis(axis, rows, panel)
    for above, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if not points or name in same:
            continue
        few = len(points) < max(len(rows) / 2, 3)
        drawn = {"marker": "o", "markersize": 4, "linewidth": 2.2} if few else {"linewidth": 1.2}
        axes[name].plot(
            *zip(*points, strict=True), label=labels[name], color=colour, zorder=3 - above / 10, **drawn, **style
        )
        if axes[name] is not axis:  # the legend belongs to the left axis
            axis.plot([], [], label=f"{labels[name]} (right)", color=colour, **drawn)


def _right_axis(axis: Any, rows: list[dict[str, float]], panel: Panel) -> dict[str, Any]:
    """Add an axis for metrics that need their own. Values outside 0 to 1 would squeeze the other curves."""
    values = [row[name] for row in rows for name in panel.right if name in row]
    drawn = any(name in row for row in rows for name in panel.metrics if name not in panel.right)
    if not drawn or all(0 <= value <= 1 for value in values):
        return {}
    right = axis.twinx()
    right.set_ylabel(panel.axes[1], color=INK)
    right.spines["top"].set_visible(False)
    _limits(right, min(0, *values), max(0, *values))
    return dict.fromkeys(panel.right, right)


def _mark_syncs(panel: Any, rows: list[dict[str, float]]) -> None:
    counts = [(row["step"], row["sync/count"]) for row in rows if "sync/count" in row]
    steps = [b[0] for a, b in itertools.pairwise([(0, 0), *counts]) if b[1] > a[1]]
    if 0 < len(steps) <= 100:
        panel.plot(steps, [0] * len(steps), "^", color=SYNC, markersize=4, clip_on=False, zorder=5, label="sync")


def _style(panel: Any, floor: float) -> None:
    panel.set_xlabel("step", color=INK)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    lowest, highest = min(panel.dataLim.y0, 0), max(panel.dataLim.y1, floor)
    if lowest == highest:
        highest = 1  # all values are 0: no success, no age, nothing clipped
    _limits(panel, lowest, highest)
    if lowest == 0 and 0.5 < highest <= 1:
        panel.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)


def _limits(axis: Any, lowest: float, highest: float) -> None:
    """Leaves space for the legend above the curves."""
    height = highest - lowest
    axis.set_ylim(lowest and lowest - 0.05 * height, highest + 0.2 * height)
