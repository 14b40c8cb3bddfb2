"""The style of the lab's tables and plots. The plots look like those of a run."""

import re
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from solera.report.plot import COLOURS, FAINT, INK

__all__ = ["COLOURS", "FAINT", "INK", "canvas", "name_below", "sheet", "short"]


def canvas(rows: int, columns: int, title: str, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """A figure and its panels, row by row."""
    figure = Figure(figsize=(10, height * rows), dpi=110, layout="constrained")
    figure.suptitle(title, color=INK)
    panels = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for panel in panels:
        panel.title.set_color(INK)
        panel.grid(axis="y", color=FAINT, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def name_below(figure: Figure, *panels: Any) -> None:
    """One legend for all panels, placed below them so that it hides nothing."""
    named = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        named.values(), named.keys(), frameon=False, fontsize=8, loc="outside lower center", ncols=min(6, len(named))
    )


def sheet(title: str, *columns: str) -> Table:
    """An empty table whose first column is never truncated."""
    table = Table(title=title, box=None, padding=(0, 1), pad_edge=False, title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0, justify="left" if i == 0 else "right")
    return table


def short(value: float | None, digits: int = 2) -> str:
    """`.97`, `-.17`, `1.00`, or a dash if there is no value."""
    return "–" if value is None else re.sub(r"^(-?)0\.", r"\1.", f"{round(value, digits) + 0.0:.{digits}f}")
