"""What the user sees during a sweep: a line for each run that ends and, on a terminal, a progress bar. Elsewhere a line
about all runs comes if nothing was said for a minute."""

import json
import os
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from solera.errors import counted
from solera.folder.checkpoint import checkpoints, step_of
from solera.folder.paths import CHECKPOINTS, METRICS
from solera.sweep.plan import PlannedRun

LONGEST_LINE = 1 << 16
"""Bytes at the end of a run's metrics that contain its last line."""
QUIET = 60.0
"""Seconds without a line, where there is no progress bar."""


class Progressing:
    """Counts batches over all runs. The remaining time is estimated from the batches since the command started."""

    def __init__(self, runs: list[PlannedRun], console: Console) -> None:
        self.console = console
        self._learned = {run.name: kept(run) for run in runs}
        self._total = self._left = sum(run.config.run.steps for run in runs)
        self._before = sum(self._learned.values())
        self._start = self._said = time.monotonic()
        self._bar = Progress(
            TextColumn("batches"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[runs]}"),
            TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=self._total, runs="", left="")

    def update(self, running: list[PlannedRun], waiting: list[PlannedRun]) -> None:
        """Count the batches of the active runs. Runs that are neither active nor waiting have nothing left to do."""
        self._learned |= {run.name: learned(run) for run in running}
        self._left = sum(run.config.run.steps - self._learned[run.name] for run in (*running, *waiting))
        state = f"{counted(len(running), 'run')} active, {len(waiting)} waiting"
        done = self._total - self._left
        self._bar.update(self._task, completed=done, runs=state, left=self.left())
        if not self.console.is_terminal and time.monotonic() - self._said >= QUIET:
            self.say(f"batches   {done:,} of {self._total:,}, {state}")

    def say(self, sentence: str) -> None:
        self._said = time.monotonic()
        self.console.print(Text(f"{sentence}  {self.left()}".rstrip()))

    def left(self) -> str:
        """The estimated remaining time in words; empty before the first batch."""
        made = sum(self._learned.values()) - self._before
        if made <= 0 or not self._left:
            return ""
        seconds = round(self._left * (time.monotonic() - self._start) / made)
        return f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"

    def __enter__(self) -> "Progressing":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def learned(run: PlannedRun) -> int:
    """Batches that a run has trained on, from the last complete line of its metrics."""
    try:
        with (run.folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    return min(json.loads(lines[-2])["step"] + 1, run.config.run.steps) if len(lines) > 1 else 0


def kept(run: PlannedRun) -> int:
    """Batches that a run keeps when it is resumed: those before its newest checkpoint."""
    found = checkpoints(run.folder / CHECKPOINTS)
    return min(step_of(found[-1]), run.config.run.steps) if found else 0
