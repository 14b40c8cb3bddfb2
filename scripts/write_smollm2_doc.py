#!/usr/bin/env python3
"""Write the tables and figures of docs/results.md for the sweeps with SmolLM2 (recipes/sweep_gsm8k_*.toml and
sweep_countdown.toml), from the small files of finished runs in docs/results/NAME/.

.venv/bin/python scripts/write_smollm2_doc.py            # from docs/results/
.venv/bin/python scripts/write_smollm2_doc.py --collect  # copy new files from sweeps/ first

A sweep may be unfinished: the page then lists the runs that are missing. A sweep without a subsection gets one as soon
as it has a finished run. The text outside the markers is written by hand and stays as it is.
"""

import json
import math
import runpy
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from solera.config import parse
from solera.diagnosis.student import central_probability, two_sided_quantile
from solera.folder.files import write_whole
from solera.report.plot import FAINT, INK
from solera.sweep.curves import PALETTE, curve
from solera.sweep.file import read_plan
from solera.sweep.plan import Cell, Plan
from solera.sweep.results import Measures, Pace, Results, RunResult
from solera.sweep.state import read_record, refuse_other
from solera.sweep.student import holm, spread

ROOT = Path(__file__).resolve().parents[1]
DOC, PUBLISHED, FIGURES = ROOT / "docs" / "results.md", ROOT / "docs" / "results", ROOT / "docs" / "figures"
QUESTIONS = {
    "gsm8k_second": "Mroueh et al. on GSM8K",
    "gsm8k_first": "Yao et al. on GSM8K",
    "countdown": "Yao et al. on countdown",
    "gsm8k_long": "How far does it get?",
    "gsm8k_adaptive": "The adaptive sync rule on GSM8K",
    "gsm8k_mixed": "Written solutions in the policy's groups on GSM8K",
    "gsm8k_dual_clip": "A dual clip with old data on GSM8K",
    "gsm8k_stream": "Streaming against lock-step on GSM8K",
}
"""The sweeps, in the order of the page, and the titles of their subsections."""
VERDICTS, EVALUATION = "verdicts_smollm2", "gsm8k_long_eval"
"""Names of the files of benchmarks/verdict_coverage.py, and of `solera eval` after recipes/sweep_gsm8k_long.toml."""
END = "<!-- end of SmolLM2 -->\n"
"""Where new subsections are added."""


def published(plan: Plan) -> Results:
    """The finished runs of a sweep in docs/results/NAME. A run whose config differs from the recipe's is refused."""
    runs = []
    for run in plan.runs():
        file = PUBLISHED / plan.name / f"{run.name}.json"
        if (record := read_record(file)) is None:
            runs.append(RunResult(run, "new", None, None, []))
            continue
        refuse_other(plan, run, parse(record["config"], str(file)), file, "remove that file")
        points = [(step, accuracy) for step, accuracy in record["curve"]]
        pace = Pace(**record["pace"]) if record["pace"] is not None else None
        runs.append(RunResult(run, "finished", None, Measures(**record["measures"]), points, pace))
    return Results(plan, runs)


def collected(plan: Plan) -> None:
    """Copy the files of finished runs from the sweep's folder."""
    for file in sorted((plan.folder / "results").glob("*.json")):
        (PUBLISHED / plan.name).mkdir(exist_ok=True)
        shutil.copy(file, PUBLISHED / plan.name)


def collected_beside(folder: Path) -> None:
    """Copy the verdicts, and the evaluation of the long runs without its list of problems, from the sweeps' folder."""
    for file in sorted(folder.glob(f"{VERDICTS}_*.jsonl")):
        shutil.copy(file, PUBLISHED)
    if (file := folder / f"{EVALUATION}.json").exists():
        content = json.loads(file.read_text(encoding="utf-8"))
        models = [{name: model[name] for name in ("model", "estimates")} for model in content["models"]]
        kept = {"settings": content["settings"], "models": models}
        write_whole(PUBLISHED / file.name, json.dumps(kept, indent=1) + "\n")


def pooled(results: Results) -> tuple[float, int]:
    """Standard deviation over seeds of the final accuracy, pooled over all cells, and its degrees of freedom.

    s² = Σ_c Σ_i (x_ci − m_c)² / Σ_c (S_c − 1). Two or three seeds of one cell alone would say little about its spread.
    (NaN, 0) if there is no spread.
    """
    squares, freedom = 0.0, 0
    for cell in results.plan.cells:
        values = list(results.values(cell, "final").values())
        if (deviation := spread(values)) is not None:
            squares, freedom = squares + deviation**2 * (len(values) - 1), freedom + len(values) - 1
    return (math.sqrt(squares / freedom), freedom) if squares else (math.nan, 0)


def ranges(results: Results, cell: Cell) -> tuple[str, str]:
    """95 % interval of a cell's mean, m ± t·s/√S, and where one more run should fall, m ± t·s·√(1 + 1/S)."""
    deviation, freedom = pooled(results)
    values = list(results.values(cell, "final").values())
    if not freedom:
        return "–", "–"
    t, mean, seeds = two_sided_quantile(freedom), fmean(values), len(values)
    halves = (t * deviation * factor for factor in (seeds**-0.5, (1 + 1 / seeds) ** 0.5))
    of_mean, of_one = (f"{100 * max(0, mean - half):.1f} to {100 * (mean + half):.1f}" for half in halves)
    return of_mean, of_one


def largest_fall(accuracies: Sequence[float]) -> float:
    """By how much accuracy fell below an earlier evaluation, at most.

    >>> largest_fall([0.25, 0.75, 0.5, 1.0, 0.875])
    0.25
    """
    return max((max(accuracies[: i + 1]) - now for i, now in enumerate(accuracies)), default=0.0)


def stopped_at(means: Sequence[tuple[float, float]]) -> float | None:
    """The step of the first evaluation that neither of the next two exceeds; `None` if there is none.

    >>> stopped_at([(0, 0.1), (50, 0.3), (100, 0.2), (150, 0.3)]), stopped_at([(0, 0.1), (50, 0.3), (100, 0.2)])
    (50, None)
    """
    for (step, now), *after in zip(means, means[1:], means[2:], strict=False):
        if all(later <= now for _, later in after):
            return step
    return None


def gpu_minutes(results: Results) -> float:
    """Time of the finished runs, each divided by the number of runs that shared the GPU."""
    return sum(map(_gpu_seconds, results.runs)) / 60


def _gpu_seconds(result: RunResult) -> float:
    """Of a run that was stopped and continued, only the last part was timed; the rest is taken to be as fast.
    If that part had no batch, its batches count, without evaluations."""
    if result.pace is None or result.measures is None:
        return 0.0
    each = result.pace.seconds / result.pace.steps if result.pace.steps else result.measures.seconds
    return each * result.run.config.run.steps / result.pace.active


def state(results: Results) -> str:
    """How many runs are finished, which are missing, and from how many warm starts they began."""
    missing = [f"`{result.run.name}`" for result in results.runs if result.measures is None]
    done, steps = len(results.runs) - len(missing), {run.config.run.steps for run in results.plan.runs()}
    begun = Counter(result.curve[0][1] for result in results.runs if result.measures is not None)
    starts = ", ".join(f"{100 * accuracy:.2f} % ({count} runs)" for accuracy, count in begun.most_common())
    words = (
        f"{done} of {len(results.runs)} runs of {max(steps)} batches are finished; they took "
        f"{gpu_minutes(results):.0f} GPU minutes. Accuracy before training: {starts}.\n"
    )
    if len(missing) > 12:
        return f"{words}Missing: {len(missing)} runs, such as {', '.join(missing[:3])}.\n"
    return words + (f"Missing: {', '.join(missing)}.\n" if missing else "")


def tables(results: Results) -> str:
    """One table for each combination of conditions, best cell first, then the comparisons with the baseline."""
    blocks = []
    for title, cells in results.plan.panels().items():
        name = next(iter(results.plan.axes))
        head = (f"{name}{'' if title == 'all' else f' ({title})'}", "end (%)", "95 % interval", "one more run",
                "by seed", "mean (%)", "largest fall", "clipped (%)", "syncs", "s per batch")  # fmt: skip
        rows = [_row(results, cell) for cell in results.ranked(cells) if results.of(cell)]
        if rows:
            blocks.append(table(head, rows))
    return "\n".join([*blocks, *_compared(results)])


def _row(results: Results, cell: Cell) -> tuple[str, ...]:
    runs = results.of(cell)
    paces = [result.pace for result in runs if result.pace is not None and result.pace.steps]
    fall = fmean(largest_fall([accuracy for _, accuracy in result.curve]) for result in runs)
    by_seed = ", ".join(f"{100 * value:.1f}" for value in results.values(cell, "final").values())
    clipped, syncs = (results.spread(cell, name) for name in ("clipped", "syncs"))
    batch, active = ([getattr(pace, name) for pace in paces] for name in ("batch", "active"))
    return (
        f"`{cell.compared}`", f"{100 * fmean(results.values(cell, 'final').values()):.1f}", *ranges(results, cell),
        by_seed, f"{100 * fmean(results.values(cell, 'mean').values()):.1f}", f"{100 * fall:.1f}",
        f"{100 * clipped.mean:.1f}" if clipped else "–", f"{syncs.mean:.0f}" if syncs else "–",
        f"{fmean(batch):.2f} ({fmean(active):.1f} runs)" if paces else "–",
    )  # fmt: skip


def _compared(results: Results) -> list[str]:
    """Each cell against its baseline: the difference d of the means, d ± t·s·√(1/S + 1/S'), and p of no difference."""
    deviation, freedom = pooled(results)
    found = []
    for one in results.comparisons():
        ours, theirs = (results.values(cell, "final") for cell in (one.cell, one.against))
        error = deviation * math.sqrt(1 / len(ours) + 1 / len(theirs)) if freedom else math.nan
        found.append((one, fmean(ours.values()) - fmean(theirs.values()), error))
    p_values = holm([1 - central_probability(abs(d) / error, freedom) for _, d, error in found]) if freedom else []
    rows = []
    for place, (one, d, error) in enumerate(found):
        half = two_sided_quantile(freedom) * error if freedom else math.nan
        interval = f"{100 * (d - half):+.1f} to {100 * (d + half):+.1f}" if freedom else "–"
        p = "–" if not freedom else "< 0.001" if p_values[place] < 0.001 else f"{p_values[place]:.3f}"
        seeds = f"{one.difference.higher}/{one.difference.lower} of {one.difference.seeds}"
        rows.append((f"`{one.cell.name}`", f"`{one.against.name}`", f"{100 * d:+.1f}", interval, seeds, p))
    head = ("cell", "compared with", "difference (points)", "95 % interval", "seeds higher/lower", "p (Holm)")
    return [table(head, rows, words=2)] if rows else []


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], words: int = 1) -> str:
    """A table of Markdown. The first columns are `words`, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows)) + "\n"


def stop_words(results: Results) -> str:
    """Where accuracy stopped improving, for each cell of a sweep."""
    words = []
    for cell in results.plan.cells:
        means = [(step, mean) for step, mean, _, _ in curve(results, cell)]
        if means:
            step = stopped_at(means)
            best = f"{100 * dict(means)[step]:.1f} %" if step is not None else ""
            words.append(
                f"`{cell.name}` did not meet the stop rule within {means[-1][0]:.0f} batches.\n" if step is None
                else f"`{cell.name}` stopped improving after {step:.0f} batches, at {best} (mean over seeds).\n"
            )  # fmt: skip
    return "".join(words)


def evaluation() -> str:
    """The table of `solera eval`: each model with 95 % intervals over test problems."""
    models = json.loads((PUBLISHED / f"{EVALUATION}.json").read_text(encoding="utf-8"))["models"]
    names = [name for name in models[0]["estimates"] if not name.startswith("reward")]
    rows = [
        (f"`{Path(model['model']).name}`", *(_estimate(model["estimates"][name]) for name in names)) for model in models
    ]
    return table(("model", *(f"{name} (%)" for name in names)), rows)


def _estimate(one: dict[str, float]) -> str:
    return f"{100 * one['value']:.1f} ({100 * one['low']:.1f} to {100 * one['high']:.1f})"


def verdicts() -> str:
    """The report on all files of benchmarks/verdict_coverage.py."""
    report = runpy.run_path(str(ROOT / "benchmarks" / "verdict_report.py"))["report"]
    lines = [line for file in _verdict_files() for line in file.read_text(encoding="utf-8").splitlines()]
    told = [line if "|" in line else f"- {line}" for line in report([json.loads(line) for line in lines])]
    return "\n".join(told) + "\n"


def _verdict_files() -> list[Path]:
    return sorted(PUBLISHED.glob(f"{VERDICTS}_*.jsonl"))


def draw_curves(results: Results) -> Figure:
    """Accuracy over batches: mean over seeds, band from the lowest to the highest seed; a panel per condition."""
    panels = _with_runs(results)
    figure = Figure(figsize=(max(8, 2 + 3.4 * len(panels)), 4.4), dpi=100, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, cells) in zip(axes, panels.items(), strict=True):
        _style(axis, "" if title == "all" else title, "batches")
        for cell in cells:
            if points := curve(results, cell):
                steps, means, lows, highs = zip(*points, strict=True)
                colour = _colour(results, cell)
                axis.fill_between(steps, *_percent(lows, highs), color=colour, alpha=0.15, linewidth=0)
                axis.plot(steps, *_percent(means), color=colour, marker="o", markersize=3, label=cell.compared)
    axes[0].set_ylabel("accuracy on held-out problems (%)", color=INK)
    _finish(figure, axes)
    return figure


def draw_final(results: Results) -> Figure:
    """Final accuracy of each cell: a dot per seed and a line at their mean. Cells of one condition stand together."""
    cells = [cell for group in _with_runs(results).values() for cell in group if results.of(cell)]
    figure = Figure(figsize=(max(5, 1.5 + 0.62 * len(cells)), 4.4), dpi=100, layout="constrained")
    axis = figure.subplots()
    _style(axis, "", "")
    places = [place + 0.8 * _group(results, cell) for place, cell in enumerate(cells)]
    for x, cell in zip(places, cells, strict=True):
        (finals,), colour = _percent([*results.values(cell, "final").values()]), _colour(results, cell)
        axis.plot([x] * len(finals), finals, "o", color=colour, markersize=5, alpha=0.7)
        axis.hlines(fmean(finals), x - 0.35, x + 0.35, color=colour, linewidth=2.5)
    start = 100 * fmean(result.curve[0][1] for result in results.runs if result.measures is not None)
    axis.axhline(start, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label="before training")
    axis.set_xticks(places, [cell.compared for cell in cells], rotation=35, ha="right", rotation_mode="anchor")
    for group, title in enumerate(_with_runs(results)):
        of_it = [x for x, cell in zip(places, cells, strict=True) if _group(results, cell) == group]
        if title != "all":
            axis.text(fmean(of_it), 1.02, title, transform=axis.get_xaxis_transform(), ha="center", color=INK)
    axis.set_ylabel("accuracy at the end (%)", color=INK)
    _finish(figure, [axis])
    return figure


def _with_runs(results: Results) -> dict[str, list[Cell]]:
    """The conditions of which a run is finished."""
    return {title: cells for title, cells in results.plan.panels().items() if any(map(results.of, cells))}


def _group(results: Results, cell: Cell) -> int:
    return next(n for n, cells in enumerate(_with_runs(results).values()) if cell in cells)


def _colour(results: Results, cell: Cell) -> str:
    return PALETTE[next(iter(results.plan.axes.values())).index(cell.compared) % len(PALETTE)]


def _percent(*rows: Sequence[float]) -> list[list[float]]:
    return [[100 * value for value in row] for row in rows]


def _style(axis: Any, title: str, below: str) -> None:
    axis.set_title(title, color=INK, fontsize=10)
    axis.set_xlabel(below, color=INK)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, axes: Sequence[Any]) -> None:
    """Scales from 0, and one legend for all panels."""
    for axis in axes:
        axis.set_ylim(bottom=0)
    shown = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = int(figure.get_figwidth() // 2)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def block(results: Results) -> str:
    """What stands between the markers of a sweep."""
    name = results.plan.name
    says = "mean over seeds, band from the lowest to the highest seed"
    pictures = f"![Accuracy over training: {says}](figures/{name}.png)\n"
    if len(results.plan.cells) > 1:
        pictures += f"\n![Accuracy at the end: a dot per seed, a line at their mean](figures/{name}_final.png)\n"
    more = [stop_words(results)] if name == "gsm8k_long" else []
    if name == "gsm8k_long" and (PUBLISHED / f"{EVALUATION}.json").exists():
        more.append(evaluation())
    return "\n".join([state(results), pictures, tables(results), *more])


def overview(sweeps: dict[str, Results]) -> str:
    """One line per sweep that has a finished run."""
    rows = []
    for name, results in sweeps.items():
        done = sum(result.measures is not None for result in results.runs)
        title = f"[{QUESTIONS[name]}](#{anchor(QUESTIONS[name])})"
        counts = f"{done} of {len(results.runs)}", str(len(results.plan.seeds)), f"{gpu_minutes(results):.0f}"
        rows.append((title, f"`recipes/{results.plan.source.name}`", *counts))
    return table(("sweep", "recipe", "runs finished", "seeds", "GPU minutes"), rows, words=2)


def anchor(title: str) -> str:
    """The link target that GitHub gives to a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def written(text: str, blocks: dict[str, tuple[str, str]]) -> str:
    """The page with each block between its markers. `blocks` has a title and a text by name; a block without markers
    is added at the end of the section."""
    for name, (title, content) in blocks.items():
        start, stop = f"<!-- smollm2: {name} -->\n", f"<!-- end smollm2: {name} -->\n"
        if start not in text:
            text = text.replace(END, f"### {title}\n\n{start}{stop}\n{END}")
        before, rest = text.split(start)
        text = before + start + content + stop + rest.split(stop)[1]
    return text


def plans() -> list[Plan]:
    return [read_plan(ROOT / "recipes" / f"sweep_{name}.toml", to_run=False) for name in QUESTIONS]


def blocks() -> tuple[dict[str, tuple[str, str]], dict[str, Results]]:
    """All blocks of the page by name, and the results of the sweeps that have any."""
    found = {plan.name: published(plan) for plan in plans()}
    sweeps = {name: results for name, results in found.items() if any(one.measures for one in results.runs)}
    made = {"overview": ("", overview(sweeps))} | {n: (QUESTIONS[n], block(results)) for n, results in sweeps.items()}
    if _verdict_files():
        made["verdicts"] = ("Are the verdicts right?", verdicts())
    return made, sweeps


def main() -> None:
    if "--collect" in sys.argv[1:]:
        for plan in plans():
            collected(plan)
        collected_beside(ROOT / "sweeps")
    made, sweeps = blocks()
    DOC.write_text(written(DOC.read_text(encoding="utf-8"), made), encoding="utf-8")
    for name, results in sweeps.items():
        draw_curves(results).savefig(FIGURES / f"{name}.png")
        if len(results.plan.cells) > 1:
            draw_final(results).savefig(FIGURES / f"{name}_final.png")
    print(f"wrote {DOC.relative_to(ROOT)}; no finished run of: {', '.join(QUESTIONS.keys() - sweeps.keys())}")


if __name__ == "__main__":
    main()
