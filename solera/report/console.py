"""What the user sees during a run: a line at each evaluation and, on a terminal, a progress bar with numbers."""

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from solera.diagnosis.verdict import CERTIFIED, HARMFUL, STATE_WORDS
from solera.protocols import Metrics

Figure = tuple[str, str, Callable[[float], str]]
WIDE = 100
"""Terminal width that is enough for a bar or a line to show everything."""
LONG = 10.0
"""Seconds after which a step also shows how many tokens have been generated."""
FIGURES: tuple[Figure, ...] = (
    ("reward", "reward/mean", "{:.2f}".format),
    ("held-out", "eval/pass@1", "{:.1%}".format),
    ("age", "age/mean", "{:.0f}".format),
    ("syncs", "sync/count", "{:.0f}".format),
    ("update", "improvement/state", lambda state: STATE_WORDS[round(state)]),
)


class StandardOutput(Console):
    """A console for output that may be piped to a command that ends early (`solera train | head`). The code that prints
    checks whether that happened."""

    reader_left = False

    def on_broken_pipe(self) -> None:
        """Stop printing. Rich would exit the process at once, in the middle of a step."""
        self.reader_left = self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def loading(console: Console) -> Iterator[None]:
    """While torch and transformers are imported: say so on a terminal. Garbage is not collected, because that would
    take a sixth of the time. Later collections skip what was imported."""
    gc.disable()
    try:
        with console.status("loading torch and transformers") if console.is_terminal else nullcontext():
            yield
        gc.freeze()
    finally:
        gc.enable()


def results_console(piped: int) -> Console:
    """For tables: as wide as the terminal or COLUMNS; without either, wide enough to wrap nothing."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else piped)


class Progressing:
    """The sink that prints to the console. Numbers keep their last value until a new one arrives."""

    def __init__(self, steps: int, console: Console) -> None:
        self.console = console
        self.steps = steps
        self._latest: dict[str, float] = {}
        self._oldest: float | None = None
        """Age of the oldest data drawn since the last line. Text from elsewhere has no age."""
        self._judged = 0
        """Step of the last update that was judged. Most updates are not judged."""
        self._verdicts: list[tuple[int, str]] = []
        """Steps and verdicts that were not printed yet."""
        self._begun = time.monotonic()
        """When the present step began."""
        self._generated: Callable[[], int] = lambda: 0
        self._before = 0
        """Tokens that had been generated when the present step began."""
        self._bar: Progress | None = None
        if console.is_terminal:
            wide = console.width >= WIDE
            self._bar = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24 if wide else 8),
                Shown(self._shown), *([TimeElapsedColumn()] if wide else []), TextColumn("ETA"),
                TimeRemainingColumn(compact=not wide), console=console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=steps)
            self._bar.start()

    def watch(self, generated: Callable[[], int]) -> None:
        """`generated` returns the tokens generated so far. The bar asks it during a long step, in a thread of its
        own."""
        self._generated, self._before = generated, generated()

    def log(self, step: int, metrics: Metrics) -> None:
        """Advance the bar. At an evaluation, print a line that stays."""
        self._latest.update(metrics)
        if "improvement/state" in metrics:
            self._judged = step
            self._verdicts.append((step, STATE_WORDS[round(metrics["improvement/state"])]))
        if "age/max" in metrics:
            self._oldest = max(self._oldest or 0.0, metrics["age/max"])
        wide = self.console.width >= WIDE
        if "eval/pass@1" in metrics:
            # Evaluations are often at syncs, where the data is fresh. So print how old it was in between.
            left_out = {"update"} if wide else {"update", "syncs"}
            fit = [figure for figure in FIGURES if figure[0] not in left_out]
            values = {name: value for name, value in self._latest.items() if name != "age/mean"}
            if self._oldest is not None:
                values["age/mean"] = self._oldest
            figures = self._figures(values, fit).replace("age", "age ≤")
            number = str(step).rjust(len(str(self.steps)))
            line = f"step {number}/{self.steps}  {figures}"
            told = verdict_words(self._verdicts, self.console.width - len(line) - 2)
            self.console.print("  ".join(filter(None, (line, told))), highlight=False, soft_wrap=True)
            self._oldest, self._verdicts = None, []
        if self._bar is not None:
            self._begun = time.monotonic()
            self._before = self._generated()
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _shown(self) -> str:
        """The text beside the bar."""
        tokens = self._generated() - self._before
        if tokens > 0 and time.monotonic() - self._begun > LONG:
            return f"{tokens:,} tokens so far  {self._figures(self._latest, FIGURES[:2])}"
        return self._figures(self._latest, FIGURES if self.console.width >= WIDE else FIGURES[:-1])

    def _figures(self, values: dict[str, float], shown: Sequence[Figure]) -> str:
        names = {"update": f"update {self._judged}"}
        return "  ".join(f"{names.get(name, name)} {form(values[key])}" for name, key, form in shown if key in values)


class Shown(ProgressColumn):
    """Text that is asked for whenever the bar is drawn."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text())


def verdict_words(verdicts: Sequence[tuple[int, str]], room: int) -> str:
    """Return the verdicts as text: each with its step if there is space for that, otherwise the number of each kind.

    >>> some = [(7, "certified"), (8, "harmful"), (9, "certified")]
    >>> verdict_words(some[:1], 80), verdict_words(some, 80), verdict_words([], 80)
    ('update 7 certified', 'updates 7 certified, 8 harmful, 9 certified', '')
    >>> verdict_words(some, 36), verdict_words(some, 24)
    ('updates 7-9: 2 certified, 1 harmful', 'updates 7-9: 1/3 harmful')
    """
    if len(verdicts) < 2:
        return "".join(f"update {step} {word}" for step, word in verdicts)
    counts, span = Counter(word for _, word in verdicts), f"updates {verdicts[0][0]}-{verdicts[-1][0]}"
    worst = HARMFUL if counts[STATE_WORDS[HARMFUL]] else CERTIFIED
    forms = (
        "updates " + ", ".join(f"{step} {word}" for step, word in verdicts),
        f"{span}: " + ", ".join(f"{counts[word]} {word}" for word in STATE_WORDS.values() if counts[word]),
        f"{span}: {counts[STATE_WORDS[worst]]}/{len(verdicts)} {STATE_WORDS[worst]}",
    )
    return next((form for form in forms if len(form) <= room), forms[-1])


class Attempting:
    """A progress bar for each model that is being evaluated, on a terminal only."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), MofNCompleteColumn(), BarColumn(bar_width=24),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, model: str, made: int, total: int) -> None:
        if model not in self._tasks:
            self._tasks[model] = self._bar.add_task(model, total=total)
        self._bar.advance(self._tasks[model], made)

    def __enter__(self) -> "Attempting":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
