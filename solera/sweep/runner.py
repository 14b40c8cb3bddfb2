"""Run several runs in parallel, each in its own process, so that a crash does not affect the others."""

import time
from collections import deque
from pathlib import Path

from rich.console import Console

from solera.run.interruption import Interruption
from solera.sweep.plan import Plan, PlannedRun
from solera.sweep.progress import Progressing
from solera.sweep.state import Failures, locked, state_of
from solera.sweep.worker import Command, Worker

INTERRUPTED = 130
"""Exit status of a run that was asked to stop and can be resumed."""
LOOK_AGAIN = 0.2
"""Seconds between two checks of the running processes."""


def run_all(plan: Plan, wanted: list[PlannedRun], jobs: int, retry: bool, console: Console, command: Command) -> bool:
    """Start or resume all wanted runs that are not finished. Returns False if the user stopped the sweep."""
    with locked(plan.folder), Interruption() as interruption:
        runner = Runner(plan.folder, wanted, retry, command)
        try:
            with Progressing(wanted, console) as progress:
                while runner.running or (runner.waiting and not interruption.wanted()):
                    if interruption.wanted():
                        runner.ask_to_stop()
                    else:
                        runner.fill(jobs)
                    sentences = runner.reap()
                    progress.update([worker.run for worker in runner.running], list(runner.waiting))
                    for sentence in sentences:
                        progress.say(sentence)
                    time.sleep(LOOK_AGAIN)
        finally:
            runner.leave_none_behind()
    return not interruption.wanted()


class Runner:
    """The waiting and the active runs of a sweep."""

    def __init__(self, folder: Path, wanted: list[PlannedRun], retry: bool, command: Command) -> None:
        self._folder, self._command = folder, command
        self._failures = Failures(folder)
        skipped = ("finished",) if retry else ("finished", "failed")
        self.waiting = deque(run for run in wanted if state_of(run, self._failures) not in skipped)
        self.running: list[Worker] = []
        self._stopping = False

    def fill(self, jobs: int) -> None:
        while self.waiting and len(self.running) < jobs:
            run = self.waiting.popleft()
            self._failures.forget(run)
            self.running.append(Worker(run, self._folder, self._command))

    def reap(self) -> list[str]:
        """Record the runs that have ended. Returns a sentence for each."""
        ended = [worker for worker in self.running if worker.status is not None]
        self.running = [worker for worker in self.running if worker not in ended]
        return [self._ended(worker) for worker in ended]

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
        if status == 0:
            return f"finished  {run.name}"
        if status == INTERRUPTED or self._stopping:
            return f"stopped   {run.name}"
        words = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        reason = f"{words}: {worker.last_line()}"
        self._failures.add(run, reason)
        return f"failed    {run.name}: {reason}"
