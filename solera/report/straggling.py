"""Detect a rank for which all others wait."""

from collections import deque
from collections.abc import Callable, Sequence

from solera.protocols import Metrics

WINDOW = 10
"""Number of updates that are considered together."""
SHARE = 0.25
"""Of the time of an update. Waiting less than this is no news."""


def straggler(rows: Sequence[Metrics], ranks: int) -> str | None:
    """Return a sentence if, in the last updates, every other rank waited much longer than one of them.

    >>> row = {"time/learn": 2.0, "rank/0/waiting": 1.5, "rank/1/waiting": 0.2}
    >>> straggler([row] * 10, 2)
    'rank 1 is slow: in the last 10 updates the others waited for it for 65 % of the time'
    """
    if len(rows) < WINDOW:
        return None
    learning = sum(row["time/learn"] for row in rows)
    waited = [sum(row[f"rank/{rank}/waiting"] for row in rows) for rank in range(ranks)]
    slowest = waited.index(min(waited))
    share = (min(waited[:slowest] + waited[slowest + 1 :]) - waited[slowest]) / learning
    if share < SHARE:
        return None
    return (
        f"rank {slowest} is slow: in the last {WINDOW} updates the others waited for it for {100 * share:.0f} % of the "
        "time"
    )


class Straggling:
    """A sink that prints this sentence once for each rank."""

    def __init__(self, ranks: int, say: Callable[[str], None]) -> None:
        self._ranks, self._say = ranks, say
        self._rows: deque[Metrics] = deque(maxlen=WINDOW)
        self._said = set[str]()

    def log(self, step: int, metrics: Metrics) -> None:
        if "rank/0/waiting" not in metrics:
            return
        self._rows.append(metrics)
        sentence = straggler(self._rows, self._ranks)
        if sentence is not None and (named := sentence.partition(" is slow")[0]) not in self._said:
            self._said.add(named)
            self._say(f"step {step}: {sentence}")

    def close(self) -> None:
        pass
