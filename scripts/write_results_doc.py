#!/usr/bin/env python3
"""Write the tables of docs/results.md for the sweeps of recipes/sweep_*.toml.

.venv/bin/python scripts/write_results_doc.py            # from docs/results/*.csv
.venv/bin/python scripts/write_results_doc.py --collect  # update these files from sweeps/ first

The text between the tables is written by hand and stays as it is.
"""

import csv
import sys
from dataclasses import asdict, dataclass, fields
from itertools import product
from math import ceil, floor
from pathlib import Path
from statistics import fmean

from solera.diagnosis.student import two_sided_quantile
from solera.sweep.file import read_plan
from solera.sweep.plan import Cell, Plan
from solera.sweep.results import SURE, Measures, Results, RunResult, collect
from solera.sweep.student import Paired, holm, paired

ROOT = Path(__file__).resolve().parents[1]
DOC, PUBLISHED = ROOT / "docs" / "results.md", ROOT / "docs" / "results"
COMPARED = ("final", "mean")
"""Measures by which cells are compared: accuracy at the end of a run, and its mean over the run."""
MORE_PAIRS = {
    "rec_family": [("rec_oneside_nois_wide", "rec_oneside_nois"), ("rec_oneside_is_wide", "rec_oneside_is"),
                   ("rec_oneside_nois", "rec_oneside_is"), ("rec_ring_nois", "rec_oneside_nois"),
                   ("red_drop", "reinforce"), ("red_weight", "reinforce")],
    "clip_or_lr": [("wide+3e-4", "narrow+1e-3"), ("wide+3e-4", "narrow+3e-3"), ("wide+1e-3", "narrow+1e-3"),
                   ("wide+3e-3", "narrow+3e-3")],
    "reference": [("every20", "every40")],
    "mixed": [("both_within", "both_between"), ("both_within", "old_within")],
    "adaptive": [("adaptive", "v5"), ("adaptive", "v10"), ("adaptive", "v20")],
    "defaults": [("topr", "rec_oneside_nois_wide")],
}  # fmt: skip
"""Comparisons besides those with the baseline, chosen before the runs; each pair holds two prefixes of cell names."""
MORE_PAIRS["rec_family_calm"] = MORE_PAIRS["rec_family"]
CERTAINTY = 0.999
FEWEST = 3
"""Smallest number of seeds for a test or an interval."""
LEAST_HALF_WIDTH = 0.01
"""Smallest half-width of a rerun range: one percentage point, in case all seeds happen to agree."""


@dataclass(frozen=True)
class Test:
    """One cell compared with another in one measure. p is corrected over all tests of the sweep."""

    cell: Cell
    against: Cell
    measure: str
    difference: Paired
    p: float | None

    @property
    def sure(self) -> bool:
        return self.p is not None and self.p < SURE


def publish(results: Results) -> None:
    """Write every run of a sweep, failed ones too, as a line of docs/results/NAME.csv."""
    steps = sorted({int(step) for run in results.runs for step, _ in run.curve})
    with (PUBLISHED / f"{results.plan.name}.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["cell", "seed", "state", *(f.name for f in fields(Measures)), *(f"step {s}" for s in steps)])
        for run in results.runs:
            measures = asdict(run.measures).values() if run.measures else [None] * len(fields(Measures))
            numbers = [*measures, *map({int(s): a for s, a in run.curve}.get, steps)]
            shown = ["" if n is None else f"{n:.5g}" for n in numbers]
            rows.writerow([run.run.cell.name, run.run.seed, run.state, *shown])


def published(plan: Plan) -> Results:
    """Read the results of a sweep from docs/results/NAME.csv."""
    with (PUBLISHED / f"{plan.name}.csv").open(newline="", encoding="utf-8") as file:
        lines = {(line["cell"], int(line["seed"])): line for line in csv.DictReader(file)}
    runs = []
    for run in plan.runs():
        line = lines[run.cell.name, run.seed]
        numbers = {f.name: float(line[f.name]) if line[f.name] else None for f in fields(Measures)}
        curve = [(float(k.split()[1]), float(v)) for k, v in line.items() if k.startswith("step ") and v]
        measures = Measures(**numbers) if line["state"] == "finished" else None
        runs.append(RunResult(run, line["state"], None, measures, curve))
    return Results(plan, runs)


def tests(results: Results) -> list[Test]:
    """Compare every cell with its baseline, and the pairs of MORE_PAIRS, in each measure; Holm corrects over all."""
    found = []
    for (cell, against), measure in product(_pairs(results.plan), COMPARED):
        ours, theirs = results.values(cell, measure), results.values(against, measure)
        differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        if len(differences) >= FEWEST:
            found.append((cell, against, measure, paired(differences)))
    corrected = iter(holm([difference.p for *_, difference in found if difference.p is not None]))
    return [Test(*one, None if one[3].p is None else next(corrected)) for one in found]


def _pairs(plan: Plan) -> list[tuple[Cell, Cell]]:
    pairs = [(cell, other) for cell in plan.cells if (other := plan.counterpart(cell))]
    by_name = {cell.name: cell for cell in plan.cells}
    for ours, theirs in MORE_PAIRS.get(plan.name, []):
        for name in [name for name in by_name if f"{name}+".startswith(f"{ours}+")]:
            pairs.append((by_name[name], by_name[theirs + name[len(ours) :]]))
    return list(dict.fromkeys(pairs))


def again(values: dict[int, float]) -> tuple[float, float]:
    """Range where the mean should fall if all seeds are run again: m ± t(S−1)·s·√(2/S), at 99.9 %.

    This is the range for S different seeds. The same seeds on other hardware are at worst as different, because
    rounding makes runs drift apart.
    """
    seeds, mean = len(values), fmean(values.values())
    deviation = (sum((value - mean) ** 2 for value in values.values()) / (seeds - 1)) ** 0.5
    half = max(two_sided_quantile(seeds - 1, CERTAINTY) * deviation * (2 / seeds) ** 0.5, LEAST_HALF_WIDTH)
    return max(0.0, mean - half), min(1.0, mean + half)


def panel_tables(results: Results) -> str:
    """One table for each combination of the other axes, best cell first."""
    found = {(test.cell, test.measure): test for test in tests(results)
             if test.against == results.plan.counterpart(test.cell)}  # fmt: skip
    blocks = []
    for title, cells in results.plan.panels().items():
        head = (f"{next(iter(results.plan.axes))}{'' if title == 'all' else f' ({title})'}", "end", "rerun range",
                "mean", "rerun range", "end vs baseline", "mean vs baseline", "wobble", "clipped (%)",
                "syncs", "ms per batch", "seeds")  # fmt: skip
        rows = [_row(results, cell, found) for cell in results.ranked(cells)]
        blocks.append(_table(head, rows))
    return "\n".join(blocks)


def _row(results: Results, cell: Cell, found: dict[tuple[Cell, str], Test]) -> tuple[str, ...]:
    figures = []
    for measure in COMPARED:
        spread, values = results.spread(cell, measure), results.values(cell, measure)
        low, high = again(values)
        within = "–" if len(values) < FEWEST else f"{floor(100 * low)}–{ceil(100 * high)}"
        figures += [f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}", within]
    untested = "–" if results.plan.counterpart(cell) else "baseline"
    against = [_verdict(found[cell, m]) if (cell, m) in found else untested for m in COMPARED]
    others = [_figure(results, cell, *one) for one in (("wobble", 100, 1), ("clipped", 100, 1), ("syncs", 1, 0),
                                                       ("seconds", 1000, 0))]  # fmt: skip
    return (f"`{cell.compared}`", *figures, *against, *others, str(len(results.of(cell))))


def _figure(results: Results, cell: Cell, measure: str, factor: float, digits: int) -> str:
    spread = results.spread(cell, measure)
    return "–" if spread is None else f"{factor * spread.mean:.{digits}f}"


def _verdict(test: Test) -> str:
    if test.p is None:
        return "same on all seeds" if abs(test.difference.mean) < 1e-12 else f"{100 * test.difference.mean:+.1f}"
    shown = f"{100 * test.difference.mean:+.1f}"
    return f"**{shown}**" if test.sure else f"{shown} (n.s.)"


def pair_table(results: Results) -> str:
    """The comparisons of MORE_PAIRS, one line each."""
    more = [test for test in tests(results) if test.against != results.plan.counterpart(test.cell)]
    rows = []
    for test in more:
        d = test.difference
        interval = "–" if d.low is None else f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
        p = "–" if test.p is None else "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
        what = "end" if test.measure == "final" else "mean"
        rows.append((f"`{test.cell.name}`", f"`{test.against.name}`", what, _verdict(test), interval,
                     f"{d.higher}/{d.lower} of {d.seeds}", p))  # fmt: skip
    head = ("cell", "compared with", "measure", "difference", "95 % interval", "seeds higher/lower", "p (Holm)")
    return _table(head, rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows)) + "\n"


def written(text: str, sweeps: dict[str, Results]) -> str:
    """Return the document with the block between each pair of markers replaced."""
    for name, results in sweeps.items():
        for kind, make in (("tables", panel_tables), ("pairs", pair_table)):
            start, stop = f"<!-- {kind}: {name} -->\n", f"<!-- end {kind}: {name} -->\n"
            if start in text:
                before, rest = text.split(start)
                text = before + start + make(results) + stop + rest.split(stop)[1]
    return text


def plans() -> list[Plan]:
    """The sweeps of the embedded model. Those on GSM8K and countdown need a model that another recipe makes."""
    paths = sorted((ROOT / "recipes").glob("sweep_*.toml"))
    return [read_plan(path) for path in paths if not path.stem.startswith(("sweep_gsm8k", "sweep_countdown"))]


def main() -> None:
    if "--collect" in sys.argv[1:]:
        for plan in plans():
            if (plan.folder / "runs").is_dir():
                publish(collect(plan))
    sweeps = {plan.name: published(plan) for plan in plans()}
    DOC.write_text(written(DOC.read_text(encoding="utf-8"), sweeps), encoding="utf-8")


if __name__ == "__main__":
    main()
