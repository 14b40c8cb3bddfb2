"""The time of a sweep: its limit, how long a run will take, and what running side by side gains."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from solera.sweep.plan import PlannedRun
from solera.sweep.progress import kept
from solera.sweep.results import Results
from solera.sweep.worker import Worker


@dataclass(frozen=True)
class Estimates:
    """Seconds per batch of each cell, from its finished runs. A cell without one is taken to be as slow as the slowest
    cell."""

    by_cell: dict[str, float]

    @classmethod
    def of(cls, results: Results) -> "Estimates":
        slowest: dict[str, float] = {}
        for result in results.runs:
            if result.pace is not None and result.pace.steps:
                name, each = result.run.cell.name, result.pace.seconds / result.pace.steps
                slowest[name] = max(each, slowest.get(name, 0.0))
        return cls(slowest)

    def seconds(self, run: PlannedRun, running: Sequence[Worker] = ()) -> float:
        """How long a run will take from its newest checkpoint on; 0 if nothing is known. Active runs count, too."""
        known = dict(self.by_cell)
        for worker in running:
            if worker.made:
                known.setdefault(worker.run.cell.name, worker.seconds / worker.made)
        each = known.get(run.cell.name, max(known.values(), default=0.0))
        return each * (run.config.run.steps - kept(run))


class Clock:
    """Counts the time of this command."""

    def __init__(self, minutes: float | None) -> None:
        self._start = self._last = time.monotonic()
        self._end = math.inf if minutes is None else self._start + 60 * minutes
        self.of_runs = 0.0
        """Seconds of all runs, added up."""

    @property
    def wall(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def count(self, running: Sequence[Worker]) -> None:
        """Give the time since the last call to the runs that were active."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        for worker in running:
            worker.seconds += passed
            worker.together += passed * len(running)
        self.of_runs += passed * len(running)
