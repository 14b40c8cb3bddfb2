"""The results of a sweep's finished runs: measures of each run, spread over seeds, and comparisons with the
baseline."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, TypeVar, get_type_hints

from solera.errors import SoleraError
from solera.folder.files import write_whole
from solera.folder.paths import CONFIG, METRICS, MODEL, REPORT
from solera.report.html import write_report
from solera.report.run_folder import RunFolder, read_run
from solera.report.summary import ACCURACY
from solera.sweep.plan import Cell, Plan, PlannedRun
from solera.sweep.state import Failures, State, damaged, read_record, record_file, state_of
from solera.sweep.student import Paired, holm, paired, spread

T = TypeVar("T")
SURE = 0.05
"""A difference counts if its corrected p is below this."""
ALONE = 1.1
"""A run was alone if fewer runs than this were active on average, including itself."""
BATCH_TIMES = ("time/generate", "time/learn", "time/sync", "time/store")


@dataclass(frozen=True)
class Measures:
    """A finished run in numbers. Accuracies are on held-out problems."""

    final: float
    best: float
    mean: float
    """Over all evaluations, including the first and the last weights."""
    wobble: float | None
    """Standard deviation of the accuracy over the last third of the evaluations; `None` if these are fewer than 2."""
    seconds: float
    """Per batch: generating, learning, syncing and storing, without evaluations."""
    clipped: float | None
    """Share of tokens with an advantage whose gradient the clip removed, mean over batches. `None` without a clip."""
    syncs: float
    """How often the engine received weights, including the first time."""


@dataclass(frozen=True)
class Pace:
    """How fast a run was, and how many runs were active at the same time."""

    seconds: float
    """From start to end, of the command that finished the run."""
    steps: int
    """Batches in that time."""
    batch: float
    """Median seconds per batch, without evaluations. One slow batch, such as the first, does not change it."""
    active: float
    """Number of runs that were active, including this one, averaged over its time."""


@dataclass(frozen=True)
class RunResult:
    """A run of the plan, finished or not."""

    run: PlannedRun
    state: State
    failure: str | None
    measures: Measures | None
    curve: list[tuple[float, float]]
    """(step, accuracy) of each evaluation."""
    pace: Pace | None = None


@dataclass(frozen=True)
class Spread:
    """A measure over the seeds of a cell."""

    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Comparison:
    """A cell and its counterpart, compared over the seeds that both have finished."""

    cell: Cell
    against: Cell
    difference: Paired
    corrected_p: float | None

    @property
    def verdict(self) -> str:
        low, high = self.difference.low, self.difference.high
        if low is None or high is None or self.corrected_p is None:
            return "not distinguishable: no spread over seeds to judge by"
        if low <= 0 <= high:
            return "not distinguishable"
        if self.corrected_p >= SURE:
            return "not distinguishable after Holm's correction"
        return "higher" if self.difference.mean > 0 else "lower"


@dataclass(frozen=True)
class Gain:
    """What it gains to run several runs of a cell at the same time."""

    alone: float
    """Seconds per batch with one active run."""
    beside: float
    """Seconds per batch with several."""
    active: float
    """How many."""
    factor: float
    """Batches per second of all active runs together, divided by those of a single run."""


@dataclass(frozen=True)
class Results:
    """The runs of a sweep and their results."""

    plan: Plan
    runs: list[RunResult]

    def of(self, cell: Cell) -> list[RunResult]:
        """A cell's finished runs."""
        return [result for result in self.runs if result.run.cell == cell and result.measures is not None]

    def values(self, cell: Cell, measure: str) -> dict[int, float]:
        """Values by seed. Runs without the measure are skipped."""
        found = {result.run.seed: getattr(result.measures, measure) for result in self.of(cell)}
        return {seed: value for seed, value in found.items() if value is not None}

    def spread(self, cell: Cell, measure: str) -> Spread | None:
        values = list(self.values(cell, measure).values())
        return Spread(fmean(values), spread(values), len(values)) if values else None

    def ranked(self, cells: list[Cell]) -> list[Cell]:
        """Best first; cells without a finished run last."""

        def value(cell: Cell) -> float:
            found = self.spread(cell, self.plan.measure)
            return found.mean if found else -math.inf

        return sorted(cells, key=value, reverse=True)

    def comparisons(self) -> list[Comparison]:
        """Compare every cell with its counterpart, if the two have a finished seed in common. The order is that of the
        tables. The p-values are corrected over all comparisons."""
        found = []
        for cell in (cell for cells in self.plan.panels().values() for cell in self.ranked(cells)):
            against = self.plan.counterpart(cell)
            if against is None:
                continue
            ours, theirs = self.values(cell, self.plan.measure), self.values(against, self.plan.measure)
            if differences := [ours[seed] - theirs[seed] for seed in ours if seed in theirs]:
                found.append((cell, against, paired(differences)))
        tested = [difference.p for _, _, difference in found if difference.p is not None]
        corrected = iter(holm(tested))
        return [Comparison(*one, None if one[2].p is None else next(corrected)) for one in found]

    def gains(self) -> dict[str, Gain]:
        """By cell: how much faster batches were learned from with several active runs than alone. Only cells that have
        runs of both kinds."""
        found = {}
        for cell in self.plan.cells:
            paces = [result.pace for result in self.of(cell) if result.pace is not None and result.pace.batch > 0]
            alone = [pace.batch for pace in paces if pace.active < ALONE]
            beside = [pace for pace in paces if pace.active >= ALONE]
            if alone and beside:
                gain = fmean(pace.active * fmean(alone) / pace.batch for pace in beside)
                batch, active = (fmean(getattr(pace, name) for pace in beside) for name in ("batch", "active"))
                found[cell.name] = Gain(fmean(alone), batch, active, gain)
        return found

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "sweep": plan.name, "axes": plan.axes, "seeds": plan.seeds, "measure": plan.measure,
            "baseline": plan.baseline,
            "gains": {cell: asdict(gain) for cell, gain in self.gains().items()},
            "runs": [_run_as_json(result) for result in self.runs],
            "cells": [
                {"cell": cell.name, **{name: _maybe(self.spread(cell, name)) for name in Measures.__annotations__}}
                for cell in plan.cells
            ],
            "comparisons": [
                {"cell": one.cell.name, "against": one.against.name, **asdict(one.difference),
                 "corrected_p": one.corrected_p, "verdict": one.verdict}
                for one in self.comparisons()
            ],
        }  # fmt: skip


def collect(plan: Plan) -> Results:
    """Read the record or the folder of every run. Only finished runs are measured."""
    failures = Failures(plan.folder)
    return Results(plan, [_result(plan, run, state_of(plan, run, failures), failures.get(run)) for run in plan.runs()])


def _result(plan: Plan, run: PlannedRun, state: State, failure: str | None) -> RunResult:
    if state != "finished":
        return RunResult(run, state, failure, None, [])
    file = record_file(plan.folder, run)
    if (record := read_record(file)) is not None:
        try:
            curve = [(step, accuracy) for step, accuracy in record["curve"]]
            if not all(isinstance(number, int | float) for point in curve for number in point):
                raise TypeError
            pace = None if record.get("pace") is None else _of_numbers(Pace, record["pace"])
            return RunResult(run, state, None, _of_numbers(Measures, record["measures"]), curve, pace)
        except (TypeError, ValueError) as error:
            raise damaged(file) from error
    folder = read_run(run.folder)
    return RunResult(run, state, None, measured(folder, run.config.run.steps), folder.points(ACCURACY))


def _of_numbers(kind: type[T], fields: dict[str, Any]) -> T:
    """Refuses a field that is missing or unknown, and a value of another type."""
    if not all(isinstance(fields.get(name), known | int) for name, known in get_type_hints(kind).items()):
        raise TypeError
    return kind(**fields)


def pace_of(run: PlannedRun, seconds: float, active: float, before: int) -> Pace:
    """The pace of a run that has just finished. `before` is the number of batches that it had kept from before this
    command."""
    rows = read_run(run.folder).rows
    batches = [sum(row.get(name, 0.0) for name in BATCH_TIMES) for row in rows if "time/learn" in row]
    return Pace(seconds, run.config.run.steps - before, median(batches[before:] or [0.0]), active)


def write_record(plan: Plan, run: PlannedRun, pace: Pace | None) -> Path:
    """Write the results of a finished run to a small file. The pace is not known if another command finished it."""
    folder = read_run(run.folder)
    record = {
        "run": run.name,
        "measures": asdict(measured(folder, run.config.run.steps)),
        "curve": folder.points(ACCURACY),
        "pace": _maybe(pace),
        "config": (run.folder / CONFIG).read_text("utf-8"),
    }
    file = record_file(plan.folder, run)
    file.parent.mkdir(exist_ok=True)
    return write_whole(file, json.dumps(record, indent=1, allow_nan=False) + "\n")


def record_finished(plan: Plan) -> None:
    """Write what is missing of finished runs: a run may have been stopped while it wrote its report, or finished by
    `solera train --resume`."""
    for run in plan.runs():
        if (run.folder / MODEL).is_dir() and not record_file(plan.folder, run).exists():
            write_record(plan, run, None)
            write_page(run)


def write_page(run: PlannedRun) -> None:
    """Write the report of a finished run, unless it is there or not wanted."""
    if run.config.report.page and not (run.folder / REPORT).exists():
        write_report([run.folder], run.folder / REPORT)


def measured(folder: RunFolder, steps: int) -> Measures:
    accuracies = [accuracy for _, accuracy in folder.points(ACCURACY)]
    if not accuracies:
        raise SoleraError(f"{folder.path}: {METRICS} holds no evaluation: remove this folder, and the run starts again")
    clipped = [share for _, share in folder.points("clip/fraction")]
    return Measures(
        final=accuracies[-1], best=max(accuracies), mean=fmean(accuracies), wobble=wobble(accuracies),
        seconds=sum(folder.total(name) for name in BATCH_TIMES) / steps,
        clipped=fmean(clipped) if clipped else None,
        syncs=max((count for _, count in folder.points("sync/count")), default=0),
    )  # fmt: skip


def wobble(accuracies: list[float]) -> float | None:
    """Standard deviation over the last third of the accuracies, which are in the order of the evaluations.

    >>> round(wobble([0.2, 0.6, 0.5, 0.5, 0.8, 0.6]), 6)  # of 0.8 and 0.6
    0.1
    """
    last_third = accuracies[-(-2 * len(accuracies) // 3) :]
    return pstdev(last_third) if len(last_third) > 1 else None


def _run_as_json(result: RunResult) -> dict[str, Any]:
    return {
        "cell": result.run.cell.name, "seed": result.run.seed, "folder": str(result.run.folder), "state": result.state,
        "failure": result.failure, "measures": _maybe(result.measures), "curve": result.curve,
        "pace": _maybe(result.pace),
    }  # fmt: skip


def _maybe(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
