"""A picture of a run: does it learn, how old is its data, how far off-policy was it, and what did the clip do?"""

import itertools
from pathlib import Path
from typing import Any

from solera.report.sinks import read_metrics

INK, FAINT = "#1f2933", "#d5dbe1"
COLOURS = ("#2f6db2", "#d1662f", "#3c8c5a", "#8e5aa8")


def plot_run(folder: Path) -> Path:
    """Draw `metrics.jsonl` of a run's folder into its `plot.png`."""
    from matplotlib.figure import Figure

    rows = read_metrics(folder / "metrics.jsonl")
    figure = Figure(figsize=(10, 6.4), dpi=130, layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    panels[0].set_title("Does it learn?")
    _curves(panels[0], rows, {"reward/mean": "reward of the batch", "eval/pass@1": "held-out accuracy"})
    panels[1].set_title("How old is the data it learns from? (batches)")
    same = all(row.get("age/max") == row.get("age/mean") for row in rows)
    ages = {"age/mean": "age of every response"} if same else {"age/max": "oldest response", "age/mean": "mean age"}
    _curves(panels[1], rows, ages, drawstyle="steps-post")
    _mark_syncs(panels[1], rows)
    panels[2].set_title("How far is the policy from who wrote the data?")
    _curves(panels[2], rows, {"divergence/tv_sequence": "TV of responses", "divergence/tv_token": "TV of tokens"})
    panels[3].set_title("What teaches nothing?")
    _curves(
        panels[3], rows, {"clip/fraction": "tokens clipped", "reward/zero_variance_fraction": "groups of equal reward"}
    )
    for panel in panels:
        _style(panel)
    figure.suptitle(folder.name, color=INK)
    target = folder / "plot.png"
    figure.savefig(target)
    return target


def _curves(panel: Any, rows: list[dict[str, float]], names: dict[str, str], **style: Any) -> None:
    for (name, label), colour in zip(names.items(), COLOURS, strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if not points:
            continue
        few = len(points) < max(len(rows) / 2, 3)
        drawn = {"marker": "o", "markersize": 4, "linewidth": 2.2} if few else {"linewidth": 1.2}
        panel.plot(*zip(*points, strict=True), label=label, color=colour, **drawn, **style)


def _mark_syncs(panel: Any, rows: list[dict[str, float]]) -> None:
    counts = [(row["step"], row["sync/count"]) for row in rows if "sync/count" in row]
    steps = [b[0] for a, b in itertools.pairwise([(0, 0), *counts]) if b[1] > a[1]]
    if 0 < len(steps) <= 100:
        panel.plot(steps, [0] * len(steps), "^", color=INK, markersize=4, clip_on=False, zorder=5, label="sync")


def _style(panel: Any) -> None:
    panel.set_xlabel("step", color=INK)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.title.set_color(INK)
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    highest = max(panel.dataLim.y1, 1e-6)
    panel.set_ylim(0, 1.2 * highest)  # room for the legend above the curves
    if 0.5 < highest <= 1:
        panel.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)
