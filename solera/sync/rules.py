"""When the engine gets new weights: pure functions of where the run stands and of what was measured."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from solera.config import DivergenceName, SyncConfig
from solera.protocols import Metrics


@dataclass(frozen=True)
class SyncState:
    """What the engine holds, how often it was given weights (the first time included), and whether it is time again."""

    due: bool = True
    engine_version: int = 0
    count: int = 0

    def done(self, version: int) -> "SyncState":
        """The state after the engine took `version`."""
        return SyncState(due=False, engine_version=version, count=self.count + 1)


SyncRule = Callable[[SyncState, int, Metrics], SyncState]
"""(state, version the learner has reached, diagnosis of its last batch) -> state with `due` decided."""


def every(state: SyncState, version: int, diagnosis: Metrics, *, period: int) -> SyncState:
    """Due once the learner has learned from `period` batches since the last sync: data of age 0 … period−1."""
    return replace(state, due=version - state.engine_version >= period)


def never(state: SyncState, version: int, diagnosis: Metrics) -> SyncState:
    """The engine keeps the weights it started with; all data is of version 0."""
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
    """Due where the policy's divergence from the engine's, measured on the probe after an update, is nearer to
    `set_point` now than one batch later; never before `v_min` batches, and after `v_max` in any case.

    A batch adds `D/n` after n batches that began at 0, so that is where `D + D/2n ≥ set_point`: readings at a sync lie
    around the set-point, at v batches between syncs within about a share `1/2v` of it. `ess` falls from 1: D = 1 − ess.
    """
    batches, measured = version - state.engine_version, diagnosis.get(f"probe/{metric}")
    if metric == "ess":
        measured, set_point = None if measured is None else 1 - measured, 1 - set_point
    near = measured is not None and measured * (1 + 1 / (2 * batches)) >= set_point
    return replace(state, due=batches >= v_max or (near and batches >= v_min))


def kept_for(config: SyncConfig) -> float:
    """Batches for which the engine keeps its weights after a sync, whatever is measured meanwhile."""
    return {"adaptive": config.v_min, "never": math.inf}.get(config.rule, config.period)


def always_fresh(config: SyncConfig) -> bool:
    """Whether the engine never writes with older weights than the learner's."""
    return config.rule == "every" and config.period == 1


def sync_rule(config: SyncConfig) -> SyncRule:
    if config.rule == "adaptive":
        assert config.set_point is not None  # checked with the config
        return partial(
            adaptive, metric=config.metric, set_point=config.set_point, v_min=config.v_min, v_max=config.v_max
        )
    return never if config.rule == "never" else partial(every, period=config.period)
