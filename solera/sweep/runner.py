"""Run several runs in parallel, each in its own process, so that a crash does not affect the others."""

import time
from collections import deque

from rich.console import Console

from solera.folder.paths import MODEL
from solera.run.forking import Processes
from solera.run.interruption import Interruption
from solera.sweep.clock import Clock, Estimates
from solera.sweep.machine import Share, compile_cache
from solera.sweep.plan import Plan, PlannedRun
from solera.sweep.progress import Progressing
from solera.sweep.results import collect, pace_of, record_finished, write_page, write_record
from solera.sweep.state import Failures, locked, state_of
from solera.sweep.worker import Command, Worker

INTERRUPTED = 130
"""Exit status of a run that was asked to stop and can be resumed."""
LOOK_AGAIN = 0.2
"""Seconds between two checks of the running processes."""


def run_all(
    plan: Plan,
    wanted: list[PlannedRun],
    share: Share,
    console: Console,
    command: Command,
    processes: Processes,
    *,
    retry: bool = False,
    minutes: float | None = None,
    measure: bool = False,
) -> bool:
    """Start or resume all wanted runs that are not finished. Returns False if the user or the time limit stopped it.

    With `measure`, the first run is alone, so that the others can be compared with it.
    """
    with locked(plan.folder), Interruption() as interruption:
        record_finished(plan)
        runner, clock = Runner(plan, wanted, share, retry, command, processes), Clock(minutes)
        try:
            with Progressing(wanted, console) as progress:
                while runner.running or (runner.waiting and not interruption.wanted()):
                    if interruption.wanted() or clock.left <= 0:
                        runner.ask_to_stop()
                    else:
                        runner.fill(1 if measure and not runner.finished else share.jobs, clock.left)
                    if not runner.running:
                        break  # no run would finish in time
                    time.sleep(LOOK_AGAIN)
                    clock.count(runner.running)
                    sentences = runner.reap()
                    progress.update([worker.run for worker in runner.running], list(runner.waiting))
                    for sentence in sentences:
                        progress.say(sentence)
        finally:
            runner.leave_none_behind()
    if clock.of_runs > 0:
        console.print(
            f"{clock.of_runs:.0f} s of runs took {clock.wall:.0f} s: {clock.of_runs / clock.wall:.2f} side by side on "
            "average"
        )
    return not interruption.wanted() and not runner.waiting and not runner.stopped


class Runner:
    """The waiting and the active runs of a sweep."""

    def __init__(
        self, plan: Plan, wanted: list[PlannedRun], share: Share, retry: bool, command: Command, processes: Processes
    ) -> None:
        self._plan, self._share, self._command, self._processes = plan, share, command, processes
        self._environment = compile_cache(plan.folder.parent) if share.on_gpu else {}
        self._failures = Failures(plan.folder)
        self._estimates = Estimates.of(collect(plan))
        skipped = ("finished",) if retry else ("finished", "failed")
        self.waiting = deque(run for run in wanted if state_of(plan, run, self._failures) not in skipped)
        self.running: list[Worker] = []
        self.finished = 0
        self.stopped = 0
        self._stopping = False

    def fill(self, jobs: int, left: float) -> None:
        """Start runs while there is room for them, each only if it will finish in the seconds that are left."""
        while len(self.running) < jobs:
            run = next((run for run in self.waiting if self._estimates.seconds(run, self.running) <= left), None)
            if run is None:
                return
            self.waiting.remove(run)
            self._failures.forget(run)
            self.running.append(
                Worker(run, self._plan.folder, self._command, self._share, self._environment, self._processes)
            )

    def reap(self) -> list[str]:
        """Record the runs that have ended. Returns a sentence for each."""
        ended = [worker for worker in self.running if worker.status is not None]
        self.running = [worker for worker in self.running if worker not in ended]
        sentences = [self._ended(worker) for worker in ended]
        if ended:
            self._estimates = Estimates.of(collect(self._plan))
        return sentences

    def ask_to_stop(self) -> None:
        """First request: each run finishes its step, saves and exits."""
        if not self._stopping:
            self._stopping = True
            self._interrupt()

    def leave_none_behind(self) -> None:
        """When the sweep ends for any reason, end its runs. Runs that were already asked to stop exit at once."""
        self._interrupt()
        for worker in self.running:
            worker.wait()

    def _interrupt(self) -> None:
        for worker in self.running:
            worker.interrupt()

    def _ended(self, worker: Worker) -> str:
        run, status = worker.run, worker.status
        assert status is not None
        stopped = status == INTERRUPTED or self._stopping
        words = f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
        reason = f"{words}: {worker.last_line()}"
        if (run.folder / MODEL).is_dir():  # also if its process ended while it wrote the run's report
            self.finished += 1
            pace = pace_of(run, worker.seconds, worker.together / worker.seconds, worker.before)
            write_record(self._plan, run, pace)
            if stopped:
                write_page(run)
            return f"finished  {run.name}{'' if status == 0 or stopped else f', but then: {reason}'}"
        if stopped:
            self.stopped += 1
            return f"stopped   {run.name}"
        self._failures.add(run, reason)
        return f"failed    {run.name}: {reason}"
