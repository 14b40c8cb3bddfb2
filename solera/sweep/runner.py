"""Starts runs side by side, each a process of its own: one that crashes cannot hurt the others."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from rich.console import Console

from solera.config import dump
from solera.interruption import Interruption
from solera.sweep.plan import Plan, PlannedRun
from solera.sweep.progress import Progressing
from solera.sweep.state import Failures, locked, state_of

INTERRUPTED = 130
"""Exit status of a run that was asked to stop and can go on."""
LOOK_AGAIN = 0.2
"""Seconds between two looks at the running processes."""


def run_all(plan: Plan, jobs: int, retry: bool, console: Console) -> bool:
    """Start or go on with every run that is not finished; False where someone asked to stop before the last ended."""
    with locked(plan.folder) as lock, Interruption() as interruption:
        runner = Runner(plan, lock, retry)
        try:
            with Progressing(plan.runs(), console) as progress:
                while runner.running or (runner.waiting and not interruption.wanted()):
                    if interruption.wanted():
                        runner.ask_to_stop()
                    else:
                        runner.fill(jobs)
                    for sentence in runner.reap():
                        progress.say(f"{sentence}  {progress.left()}".rstrip())
                    progress.update(list(runner.running), len(runner.waiting))
                    time.sleep(LOOK_AGAIN)
        finally:
            runner.leave_none_behind()
    return not interruption.wanted()


class Runner:
    """The processes of a sweep."""

    def __init__(self, plan: Plan, lock: int, retry: bool) -> None:
        self._folder, self._lock = plan.folder, lock
        self._failures = Failures(plan.folder)
        self.running: dict[PlannedRun, subprocess.Popen[bytes]] = {}
        skipped = ("finished",) if retry else ("finished", "failed")
        self.waiting = deque(run for run in plan.runs() if state_of(run, self._failures) not in skipped)
        self._stopping = False

    def fill(self, jobs: int) -> None:
        while self.waiting and len(self.running) < jobs:
            run = self.waiting.popleft()
            self._failures.forget(run)
            self.running[run] = self._start(run)

    def reap(self) -> list[str]:
        """Take note of the runs that have ended; a sentence for each."""
        ended = [(run, process) for run, process in self.running.items() if process.poll() is not None]
        return [self._ended(run, self.running.pop(run).returncode) for run, _ in ended]

    def ask_to_stop(self) -> None:
        """Once: each finishes its step, saves and leaves."""
        if not self._stopping:
            self._stopping = True
            self._signal_all()

    def leave_none_behind(self) -> None:
        """Whatever ends the sweep ends its runs; those that were asked before leave at once."""
        self._signal_all()
        for process in self.running.values():
            process.wait()

    def _signal_all(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGINT)

    def _start(self, run: PlannedRun) -> subprocess.Popen[bytes]:
        """In a process group of its own: a terminal's Ctrl-C would reach it twice, through us again."""
        if run.folder.exists():
            arguments = ["--resume", str(run.folder)]
        else:
            file = self._below("configs", f"{run.name}.toml")
            file.write_text(dump(run.config), encoding="utf-8")
            arguments = [str(file)]
        with self._log(run).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "solera.cli", "train", *arguments], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, process_group=0, pass_fds=(self._lock,),
                env={**os.environ, "OMP_NUM_THREADS": str(run.config.run.threads)},
            )  # fmt: skip

    def _ended(self, run: PlannedRun, status: int) -> str:
        if status == 0:
            return f"finished  {run.name}"
        if status == INTERRUPTED or self._stopping:
            return f"stopped   {run.name}"
        reason = f"{_words(status)}: {_last_line(self._log(run))}"
        self._failures.add(run, reason)
        return f"failed    {run.name}: {reason}"

    def _log(self, run: PlannedRun) -> Path:
        return self._below("logs", f"{run.name}.log")

    def _below(self, folder: str, name: str) -> Path:
        (self._folder / folder).mkdir(exist_ok=True)
        return self._folder / folder / name


def _words(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"killed by signal {-status}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing").removeprefix("solera: ")
