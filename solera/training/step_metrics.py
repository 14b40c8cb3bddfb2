"""The metrics of one step, gathered in one place, and how far the policy was from the authors of its data."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from solera.batch import Batch, Parts, Update
from solera.diagnosis.divergence import LogRatios, age_label
from solera.diagnosis.mismatch import Mismatch
from solera.protocols import Metrics, Store, Supply
from solera.sync.rules import SyncState

Labels = Sequence[str | None]


class StepMetrics:
    """Gathers what a step's parts report, and the seconds that each of them took."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `time/<name>`."""
        start = time.perf_counter()
        yield
        self._seconds[f"time/{name}"] += time.perf_counter() - start

    def add(self, metrics: Metrics) -> None:
        self._values |= metrics

    def get(self, name: str) -> float | None:
        return self._values.get(name)

    def row(self, batch: Batch, update: Update, sync: SyncState, supply: Supply, store: Store) -> Metrics:
        """Everything that the step logs. `sync` is the state in which its batch was drawn."""
        self.add({"sync/version": sync.engine_version, "sync/count": sync.count})
        self.add(supply.take_metrics())
        self.add({f"draw/{reason}": count for reason, count in store.passed_over().items()})
        return {**self._values, **batch.metrics, **update.metrics, **self._seconds}


def off_policy_metrics(batch: Batch, update: Update, mismatch: Mismatch, now: int, lineage: str) -> dict[str, float]:
    """How far the policy that met the batch (version `now`) was from its authors: `divergence/…`, `mismatch/logp`, and
    how many of the tokens trained on count (`tokens/effective`)."""
    scored = batch.scored
    number_B, response_T = _numbered(update.response_T, len(scored))
    if not len(number_B):
        return {}
    rollouts = [scored[number] for number in number_B]
    ratios = LogRatios(update.log_ratio_T, response_T, batch.stands_for_B[number_B])
    metrics = {f"divergence/{name}": value for name, value in ratios.divergences().items()}
    metrics |= _of_parts(Parts.of(rollouts), ratios, update.log_ratio_T, response_T, mismatch, now, lineage)
    metrics |= _divergences_by(ratios, [f"origin_{rollout.origin}" for rollout in rollouts])
    return metrics | _effective(ratios, batch, number_B < len(batch.rollouts))


def _of_parts(
    parts: Parts,
    ratios: LogRatios,
    log_ratio_T: npt.NDArray[np.floating],
    response_T: npt.NDArray[np.int64],
    mismatch: Mismatch,
    now: int,
    lineage: str,
) -> dict[str, float]:
    """What depends on who wrote each token: figures by age, engine error, causes. A part that one version wrote counts
    as a response here."""
    ages = [parts.age(part, now, lineage) for part in range(len(parts.response_P))]
    part_T, stands_for_P = parts.number_T(response_T), ratios.count_B[parts.response_P]
    of_parts = LogRatios(log_ratio_T, part_T, stands_for_P) if parts.divided else ratios
    truncated_P = np.array([(s := parts.rollouts[b].sampling) is not None and s.truncated for b in parts.response_P])
    return (
        _divergences_by(of_parts, [age_label(age) for age in ages])
        | mismatch.measure(log_ratio_T, part_T, np.array([age == 0 for age in ages]) & ~truncated_P)
        | mismatch.by_cause(log_ratio_T, part_T, ages, truncated_P, stands_for_P)
    )


def _numbered(response_T: npt.NDArray[np.int64], responses: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which of the responses have tokens here, and the number of each token's response among those."""
    present_B = np.bincount(response_T, minlength=responses) > 0
    numbers = np.flatnonzero(present_B)
    return numbers, response_T if present_B.all() else (present_B.cumsum() - 1)[response_T]


def _divergences_by(ratios: LogRatios, labels: Labels) -> dict[str, float]:
    """`divergence/<label>/…`. If all responses are alike there are none: the figures of the whole batch are theirs."""
    if len(set(labels)) < 2:
        return {}
    found = ratios.divergences_by(labels)
    return {f"divergence/{label}/{name}": value for label, figures in found.items() for name, value in figures.items()}


def _effective(ratios: LogRatios, batch: Batch, trained_B: npt.NDArray[np.bool_]) -> dict[str, float]:
    """The tokens trained on, times the effective sample size of their responses."""
    if not trained_B.any():
        return {}
    tokens = batch.metrics["tokens/trained"]
    effective = ratios.divergences(trained_B)["ess"] * tokens
    return {"tokens/effective": effective, "waste/stale": tokens - effective}
