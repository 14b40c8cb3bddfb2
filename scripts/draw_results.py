#!/usr/bin/env python3
"""Draw the figures of docs/results.md and of the README from docs/results/*.csv.

.venv/bin/python scripts/draw_results.py
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from write_results_doc import ROOT, published

from solera.report.plot import FAINT, INK
from solera.sweep.curves import PALETTE, draw
from solera.sweep.file import read_plan
from solera.sweep.plan import Cell
from solera.sweep.results import Results

FIGURES = ROOT / "docs" / "figures"
WORDS = {
    "reinforce": "reinforce: no clip", "grpo": "grpo: clip (0.2, 0.2)",
    "rec_oneside_nois_wide": "rec_oneside_nois_wide: clip (0.6, 2.0)", "red_weight": "red_weight", "topr": "topr",
    "on_policy": "on-policy", "v20": "synced every 20 batches", "lag10": "data 10 batches old", "never": "never synced",
}  # fmt: skip
"""Labels of the algorithms that are drawn (a selection of the thirteen) and of the four regimes."""


def sweep(name: str) -> Results:
    return published(read_plan(ROOT / "recipes" / f"sweep_{name}.toml"))


def regimes(name: str, results: Results) -> None:
    """Draw accuracy over batches in the four regimes: mean over seeds ± its standard error."""
    plan = results.plan
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(plan.axes["regime"]), sharey=True)
    drawn = [algorithm for algorithm in WORDS if algorithm in plan.axes["algorithm"]]
    for panel, regime in zip(panels, plan.axes["regime"], strict=True):
        _style(panel, WORDS[regime], "batches", "held-out accuracy" if regime == "on_policy" else "")
        for colour, algorithm in zip(PALETTE, drawn, strict=False):
            _curve(panel, results, _cell(results, {"algorithm": algorithm, "regime": regime}), WORDS[algorithm], colour)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save(name, figure)


def _curve(axis: Any, results: Results, cell: Cell, label: str, colour: str) -> None:
    accuracy_SE = np.array([[accuracy for _, accuracy in run.curve] for run in results.of(cell)])
    steps, mean_E = [step for step, _ in results.of(cell)[0].curve], accuracy_SE.mean(0)
    error_E = accuracy_SE.std(0, ddof=1) / len(accuracy_SE) ** 0.5
    axis.fill_between(steps, mean_E - error_E, mean_E + error_E, color=colour, alpha=0.2, linewidth=0)
    axis.plot(steps, mean_E, color=colour, linewidth=1.8, label=label)


def against(name: str, results: Results, x_axis: str, panel_axis: str, label: str, lowest: float = 0) -> None:
    """Draw mean and end accuracy against one axis: a line per compared choice, bars of ± one standard deviation."""
    plan = results.plan
    panels, choices = plan.axes[panel_axis], plan.axes[x_axis]
    figure = Figure(figsize=(1 + 3.1 * len(panels), 5.6), dpi=100, layout="constrained")
    grid = figure.subplots(2, len(panels), squeeze=False, sharey=True)
    for row, (measure, words) in enumerate((("mean", "mean"), ("final", "end"))):
        for column, panel in enumerate(panels):
            axis = grid[row][column]
            _style(axis, f"{panel_axis} {panel}", label, f"{words} accuracy" if column == 0 else "")
            axis.set_ylim(lowest, 1.02)
            for colour, compared in zip(PALETTE, next(iter(plan.axes.values())), strict=False):
                named = [{next(iter(plan.axes)): compared, x_axis: x, panel_axis: panel} for x in choices]
                _points(axis, results, [_cell(results, one) for one in named], measure, choices, compared, colour)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save(name, figure)


def by_syncs(name: str, results: Results) -> None:
    """Draw mean accuracy against the number of syncs: fixed periods as a line, the adaptive rule as a star."""
    plan = results.plan
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(plan.axes["lr"]), sharey=True)
    for panel, lr in zip(panels, plan.axes["lr"], strict=True):
        _style(panel, f"learning rate {lr.removeprefix('lr')}", "syncs in 200 batches", "mean accuracy")
        fixed = [_cell(results, {"rule": rule, "lr": lr}) for rule in plan.axes["rule"] if rule != "adaptive"]
        _against_syncs(panel, results, fixed, "fixed period v", PALETTE[0], "o-")
        _against_syncs(
            panel, results, [_cell(results, {"rule": "adaptive", "lr": lr})], "adaptive rule", PALETTE[1], "*"
        )
        for cell in fixed:
            place = (results.spread(cell, "syncs").mean, results.spread(cell, "mean").mean)
            panel.annotate(cell.compared, place, (0, -16), textcoords="offset points", ha="center", fontsize=8)
        panel.set_xscale("log")
        panel.set_xticks((5, 10, 20, 50, 100, 200), ("5", "10", "20", "50", "100", "200"))
        panel.set_ylim(0.5, 1)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    save(name, figure)


def _against_syncs(axis: Any, results: Results, cells: list[Cell], label: str, colour: str, shape: str) -> None:
    syncs, means = ([results.spread(cell, measure) for cell in cells] for measure in ("syncs", "mean"))
    axis.errorbar(
        [s.mean for s in syncs], [m.mean for m in means], [m.deviation for m in means], [s.deviation for s in syncs],
        fmt=shape, color=colour, capsize=3, label=label, markersize=12 if shape == "*" else 5,
    )  # fmt: skip


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
    for name in ("rec_family", "rec_family_calm"):
        regimes(name, sweep(name))
    for name in ("off_policy_grpo", "reference", "group_size", "mixed"):
        save(name, draw(sweep(name)))
    against("clip_or_lr", sweep("clip_or_lr"), "lr", "regime", "learning rate")
    by_syncs("adaptive", sweep("adaptive"))
    against("defaults", sweep("defaults"), "v", "lr", "batches between two syncs (v)", lowest=0.5)


if __name__ == "__main__":
    main()
