"""The result of a finished run."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from solera.folder.paths import METRICS, MODEL, REPORT
from solera.report.html import write_report
from solera.report.plot import plot_run
from solera.report.sinks import read_metrics


@dataclass(frozen=True)
class Result:
    """The result of a finished run."""

    folder: Path
    accuracy_before: float
    accuracy_after: float
    accuracy_max: float
    accuracy_mean: float
    """Over all evaluations of the run."""
    seconds: float
    plot: Path | None
    report: Path | None
    """`None` with `report.page = false`."""
    model: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dictionary per step, as in `metrics.jsonl`."""
        return read_metrics(self.folder / METRICS)


def result_of(folder: Path, seconds: float, say: Callable[[str], None], page: bool = True) -> Result:
    """Read the result from the run's folder and, with `page`, write the plot and the report."""
    rows = read_metrics(folder / METRICS)
    if not any(row.get("tokens/trained") for row in rows):
        say(f"nothing was learned: {_why_nothing(rows)}")
    accuracies = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return Result(
        folder, accuracies[0], accuracies[-1], max(accuracies), statistics.fmean(accuracies), seconds,
        plot_run(folder) if page else None, write_report([folder], folder / REPORT) if page else None, folder / MODEL,
    )  # fmt: skip


def _why_nothing(rows: list[dict[str, float]]) -> str:
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if not rewards and any(row.get("waste/truncated") for row in rows):
        return "every response was cut off and masked (raise sampling.max_tokens, or change reward.truncated)"
    if not rewards:
        return "no rewards arrived (`solera data reward` adds them to the store during a run)"
    never = "easier problems, or does the reward never accept an answer?"
    advice = "harder problems, or a reward that distinguishes the answers?" if any(rewards) else never
    return f"no batch had a group with different rewards ({advice})"
