"""Rules for when the engine gets new weights, as pure functions of the run's state and measurements."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from solera.config import DivergenceName, SyncConfig
from solera.protocols import Metrics

WITHIN = 0.3
"""`adaptive` aims to keep the divergence within this share of its set-point."""
EXPONENT: dict[DivergenceName, float] = {"tv_token": 1.0, "tv_sequence": 1.0, "kl": 1.7, "ess": 1.7}
"""Expected exponent p of the growth `D = c·n^p`, until the readings show another. A policy that moves straight ahead
has p = 1 for total variation and p = 2 for KL and 1 − ESS. Steps that partly undo each other lower it."""
PRIOR_WEIGHT = 0.3
"""Weight of `EXPONENT` against the readings, as a sum of squares of log n. Three readings have twice this weight."""

Reading = tuple[int, float]
"""Batches since the last sync, and the share of the set-point that the divergence had reached by then."""


@dataclass(frozen=True)
class SyncState:
    """The version that the engine holds, the number of syncs (including the first), and whether a sync is due."""

    due: bool = True
    engine_version: int = 0
    count: int = 0
    readings: tuple[Reading, ...] = ()
    """What `adaptive` has measured since the last sync. Empty with the other rules."""

    def done(self, version: int) -> "SyncState":
        """Return the state after the engine took `version`."""
        return SyncState(due=False, engine_version=version, count=self.count + 1)


SyncRule = Callable[[SyncState, int, Metrics], SyncState]
"""(state, version of the learner, diagnosis of its last batch) -> state with `due` decided."""


def every(state: SyncState, version: int, diagnosis: Metrics, *, period: int) -> SyncState:
    """Due once the learner has learned from `period` batches since the last sync, so data has age 0 … period−1."""
    return replace(state, due=version - state.engine_version >= period)


def never(state: SyncState, version: int, diagnosis: Metrics) -> SyncState:
    """The engine keeps its initial weights; all data has version 0."""
    return replace(state, due=False)


def adaptive(
    state: SyncState,
    version: int,
    diagnosis: Metrics,
    *,
    metric: DivergenceName,
    set_point: float,
    v_min: int,
    v_max: int,
) -> SyncState:
    """Due when the divergence between policy and engine, measured on the probe after an update, is closer to
    `set_point` now than it would be one batch later. Never before `v_min` batches, and always after `v_max`.

    With `D(n) = c·n^p` after n batches, the next reading is `D·((n+1)/n)^p`. So the sync is due when the mean of the
    two reaches the set-point. `growth` estimates p from the readings since the last sync. `ess` falls from 1, so D = 1
    − ess.
    """
    batches, share = version - state.engine_version, _share(diagnosis, metric, set_point)
    if share is None:
        return replace(state, due=batches >= v_max)
    readings = (*state.readings, (batches, share))
    next_share = share * ((batches + 1) / batches) ** growth(readings, EXPONENT[metric])
    near = (share + next_share) / 2 >= 1
    return replace(state, due=batches >= v_max or (near and batches >= v_min), readings=readings)


def growth(readings: Sequence[Reading], expected: float) -> float:
    """The exponent p of `D = c·n^p`: a least-squares line through `log D` over `log n`, drawn towards `expected`.

    `p = (Σ x·y + λ·expected) / (Σ x² + λ)`, with x and y centred and λ = `PRIOR_WEIGHT`. At least 0: a divergence that
    falls is noise. Readings of 0 have no logarithm and are left out.

    >>> round(growth([(1, 0.1), (2, 0.4), (3, 0.9)], expected=2.0), 6)
    2.0
    """
    points = [(math.log(batches), math.log(share)) for batches, share in readings if share > 0]
    if len(points) < 2:
        return expected
    x_mean, y_mean = (statistics.fmean(values) for values in zip(*points, strict=True))
    slope = PRIOR_WEIGHT * expected + math.fsum((x - x_mean) * (y - y_mean) for x, y in points)
    return max(slope / (PRIOR_WEIGHT + math.fsum((x - x_mean) ** 2 for x, _ in points)), 0.0)


def _share(diagnosis: Metrics, metric: DivergenceName, set_point: float) -> float | None:
    """The share of the set-point that the divergence has reached."""
    measured = diagnosis.get(f"probe/{metric}")
    if measured is None:
        return None
    return (1 - measured) / (1 - set_point) if metric == "ess" else measured / set_point


def saying_where_too_coarse(
    rule: SyncRule, metric: DivergenceName, set_point: float, say: Callable[[str], None]
) -> SyncRule:
    """The same rule, with one warning: if a single batch moves the policy so far that neither one batch nor two end
    within `WITHIN` of the set-point, at the growth that `EXPONENT` expects."""
    said = False

    def decide(state: SyncState, version: int, diagnosis: Metrics) -> SyncState:
        nonlocal said
        share = _share(diagnosis, metric, set_point) if version - state.engine_version == 1 else None
        if not said and share is not None and share * 2 ** EXPONENT[metric] > 1 + WITHIN and abs(share - 1) > WITHIN:
            said = True
            say(
                f"a single batch takes {metric} to {diagnosis[f'probe/{metric}']:.3g}, so no rule can keep it within "
                f"{WITHIN:.0%} of sync.set_point = {set_point:g}: lower learn.lr, or choose a set-point that several "
                "batches lead to"
            )
        return rule(state, version, diagnosis)

    return decide


def within(rule: SyncRule, max_age: float) -> SyncRule:
    """The same rule, with a sync after at most `max_age + 1` batches. Without it, a stream could not supply the next
    batch with responses that are young enough."""

    def decide(state: SyncState, version: int, diagnosis: Metrics) -> SyncState:
        decided = rule(state, version, diagnosis)
        return replace(decided, due=True) if version - state.engine_version > max_age else decided

    return decide


def kept_for(config: SyncConfig) -> float:
    """Minimum number of batches between two syncs, whatever is measured."""
    return {"adaptive": config.v_min, "never": math.inf}.get(config.rule, config.period)


def always_fresh(config: SyncConfig) -> bool:
    """Whether the engine always generates with the learner's current weights."""
    return config.rule == "every" and config.period == 1


def sync_rule(config: SyncConfig, say: Callable[[str], None] = lambda sentence: None) -> SyncRule:
    if config.rule == "adaptive":
        assert config.set_point is not None  # checked with the config
        rule = partial(
            adaptive, metric=config.metric, set_point=config.set_point, v_min=config.v_min, v_max=config.v_max
        )
        return saying_where_too_coarse(rule, config.metric, config.set_point, say)
    return never if config.rule == "never" else partial(every, period=config.period)
