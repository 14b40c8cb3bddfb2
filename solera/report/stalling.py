"""Detect batches without a learning signal. If all rewards of a group are equal, it does not show which response is
better."""

from collections import deque
from collections.abc import Callable, Sequence

from solera.objectives.table import UNCENTRED
from solera.protocols import Metrics

WINDOW = 10
"""Number of batches that are considered together."""
NEARLY_ALL = 0.9
MANY = 0.5
"""Share of responses that were cut off, above which this is the likely cause."""
SOLVED = 0.9
"""Held-out accuracy above which equal rewards mean that the task is learned."""
FLAT, ACCURACY = "reward/zero_variance_fraction", "eval/pass@1"


def compares(advantage: str | None, masked: bool) -> bool:
    """Whether an objective with this advantage and mask learns only from differences within a group."""
    return masked or (advantage is not None and advantage not in UNCENTRED)


def stall(rows: Sequence[Metrics], accuracy: float | None) -> str | None:
    """Return a warning if the rewards in nearly all groups of the last batches were equal, and the task is not solved.

    >>> stall([{"reward/zero_variance_fraction": 0.5}] * 20, 0.4) is None
    True
    """
    batches = [row for row in rows if FLAT in row][-WINDOW:]
    if len(batches) < WINDOW or (accuracy is not None and accuracy >= SOLVED):
        return None
    flat = sum(row[FLAT] for row in batches) / WINDOW
    if flat < NEARLY_ALL:
        return None
    reward = sum(row["reward/mean"] for row in batches) / WINDOW
    cut_off = sum(row.get("response/truncated", 0.0) for row in batches) / WINDOW
    cause = (
        f"{cut_off:.0%} of the responses were cut off (raise sampling.max_tokens, or ask for shorter answers)"
        if cut_off > MANY
        else "the problems are too hard or too easy, or every answer is the same (docs/tasks.md)"
    )
    share = "all" if flat == 1 else f"{min(flat, 0.99):.0%}"
    return (
        f"in the last {WINDOW} batches {share} of the groups had equal rewards ({reward:.2f} on average), so there "
        f"is nothing to learn from them: {cause}"
    )


class Stalling:
    """A sink that prints this warning once, while there is time to stop the run."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rows: deque[Metrics] = deque(maxlen=WINDOW)
        self._accuracy: float | None = None
        self._said = False

    def log(self, step: int, metrics: Metrics) -> None:
        self._accuracy = metrics.get(ACCURACY, self._accuracy)
        if self._said or FLAT not in metrics:
            return
        self._rows.append(metrics)
        if sentence := stall(self._rows, self._accuracy):
            self._say(f"step {step}: {sentence}")
            self._said = True

    def close(self) -> None:
        pass
