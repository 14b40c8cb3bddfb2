#!/usr/bin/env python3
"""Figures of docs/results.md and the README's, from docs/results/*.csv.

.venv/bin/python scripts/draw_results.py
"""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
from write_results_doc import ROOT, published

from solera.report.plot import FAINT, INK
from solera.sweep.curves import PALETTE, draw
from solera.sweep.file import read_plan
from solera.sweep.plan import Cell
from solera.sweep.results import Results

FIGURES = ROOT / "docs" / "figures"
SHOWN = ("grpo", "reinforce", "rec_oneside_nois_wide", "red_drop", "red_weight", "topr")
"""Of the thirteen algorithms, those whose curves are drawn."""


def sweep(name: str) -> Results:
    return published(read_plan(ROOT / "recipes" / f"sweep_{name}.toml"))


def part(results: Results, axis: str, choices: tuple[str, ...]) -> Results:
    """The cells with one of these choices on an axis."""
    plan = results.plan
    place = list(plan.axes).index(axis)
    cells = tuple(cell for cell in plan.cells if cell.choices[place] in choices)
    return Results(replace(plan, axes={**plan.axes, axis: choices}, cells=cells), results.runs)


def curves(name: str, results: Results) -> None:
    save(name, draw(results))


def against(name: str, results: Results, x_axis: str, panel_axis: str, label: str) -> None:
    """Mean over the run and end against the choices of one axis: a line for each compared choice, bars ± sd."""
    plan = results.plan
    panels, choices = plan.axes[panel_axis], plan.axes[x_axis]
    figure = Figure(figsize=(1 + 3.1 * len(panels), 5.6), dpi=100, layout="constrained")
    grid = figure.subplots(2, len(panels), squeeze=False, sharey=True)
    for row, (measure, words) in enumerate((("mean", "over the run"), ("final", "at the end"))):
        for column, panel in enumerate(panels):
            axis = grid[row][column]
            _style(axis, f"{panel_axis} {panel}", label, f"accuracy {words}" if column == 0 else "")
            for colour, compared in zip(PALETTE, next(iter(plan.axes.values())), strict=False):
                named = [{next(iter(plan.axes)): compared, x_axis: x, panel_axis: panel} for x in choices]
                _points(axis, results, [_cell(results, one) for one in named], measure, choices, compared, colour)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save(name, figure)


def _cell(results: Results, named: dict[str, str]) -> Cell:
    choices = tuple(named[axis] for axis in results.plan.axes)
    return next(cell for cell in results.plan.cells if cell.choices == choices)


def _points(
    axis: Any, results: Results, cells: list[Cell], measure: str, ticks: tuple[str, ...], label: str, colour: str
) -> None:
    spreads = [results.spread(cell, measure) for cell in cells]
    means, deviations = [s.mean for s in spreads], [s.deviation for s in spreads]
    axis.errorbar(range(len(ticks)), means, deviations, color=colour, marker="o", capsize=3, linewidth=1.6, label=label)
    axis.set_xticks(range(len(ticks)), ticks)


def _style(axis: Any, title: str, below: str, beside: str) -> None:
    axis.set_title(title, color=INK, fontsize=10)
    axis.set_xlabel(below, color=INK)
    axis.set_ylabel(beside, color=INK)
    axis.set_ylim(0, 1.02)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def save(name: str, figure: Any) -> None:
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=100)


def main() -> None:
    curves("rec_family", part(sweep("rec_family"), "algorithm", SHOWN))
    curves("rec_family_calm", part(sweep("rec_family_calm"), "algorithm", SHOWN))
    for name in ("off_policy_grpo", "reference", "group_size", "mixed"):
        curves(name, sweep(name))
    against("clip_or_lr", sweep("clip_or_lr"), "lr", "regime", "learning rate")
    against("defaults", sweep("defaults"), "v", "lr", "batches between two syncs (v)")


if __name__ == "__main__":
    main()
