"""A plot of what a store holds."""

from pathlib import Path
from typing import Any

from solera.folder.files import appearing
from solera.report.plot import COLOURS, INK
from solera.store.statistics import RolloutCounts, Statistics

TITLES = {
    "origin": "Origin", "age": "Age now (batches)", "reward": "Reward",
    "uses": "Number of uses",
}  # fmt: skip
FEWEST_ROWS = 5
"""Each panel has room for at least so many bars."""


def plot_holdings(found: Statistics, name: str, target: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), dpi=130, layout="constrained")
    for panel, (kind, lines) in zip(figure.subplots(2, 2).flatten(), found.items(), strict=True):
        panel.set_title(TITLES[kind], color=INK)
        _bars(panel, lines)
    if any(found.values()):
        figure.legend(*panel.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
    figure.suptitle(f"{_plain(name)}: rollouts in the store", color=INK)
    with appearing(target) as unfinished:
        figure.savefig(unfinished, format="png")
    return target


def _bars(panel: Any, lines: list[RolloutCounts]) -> None:
    """Used and unused rollouts."""
    names, used = [_plain(line.name) for line in lines], [line.used for line in lines]
    panel.barh(names, used, color=COLOURS[0], label="used")
    unused = [line.rollouts - line.used for line in lines]
    panel.barh(names, unused, left=used, color=COLOURS[0], alpha=0.35, label="never used")
    panel.set_ylim(max(len(lines), FEWEST_ROWS) - 0.5, -0.5)  # from top to bottom; one bar does not fill the panel
    panel.set_xlim(0, 1.05 * max((line.rollouts for line in lines), default=1))
    panel.spines[["top", "right"]].set_visible(False)


def _plain(name: str) -> str:
    """The name as matplotlib draws it letter by letter: a dollar would begin a formula, and some bytes of a path are
    no characters."""
    return name.encode(errors="replace").decode().replace("$", r"\$")
