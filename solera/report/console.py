"""What a person sees while a run goes on: a bar with figures on a terminal, a line at each evaluation elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from solera.protocols import Metrics

FIGURES = (
    ("reward", "reward/mean", "{:.2f}"),
    ("held-out", "eval/pass@1", "{:.1%}"),
    ("age", "age/mean", "{:.0f}"),
    ("syncs", "sync/count", "{:.0f}"),
)


class Progressing:
    """The console's sink. Figures keep their last value until a new one comes."""

    def __init__(self, steps: int, console: Console) -> None:
        self.console = console
        self.steps = steps
        self._latest: dict[str, float] = {}
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]step"), MofNCompleteColumn(), BarColumn(bar_width=24),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=steps, figures="")
            self._bar.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self._latest.update(metrics)
        figures = "  ".join(
            f"{name} {form.format(self._latest[key])}" for name, key, form in FIGURES if key in self._latest
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        elif "eval/pass@1" in metrics:
            self.console.print(f"step {step:5d}/{self.steps}  {figures}", highlight=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
