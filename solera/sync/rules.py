"""When the engine gets new weights: pure functions of where the run stands and of what was measured."""

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
    """Due once the policy's divergence from the engine's, measured on the probe after an update, passes `set_point`
    (`ess` from above, the others from below); never before `v_min` batches, and after `v_max` in any case."""
    batches, measured = version - state.engine_version, diagnosis.get(f"probe/{metric}")
    passed = measured is not None and (measured < set_point if metric == "ess" else measured > set_point)
    return replace(state, due=batches >= v_max or (passed and batches >= v_min))


def sync_rule(config: SyncConfig) -> SyncRule:
    if config.rule == "adaptive":
        assert config.set_point is not None  # checked with the config
        return partial(
            adaptive, metric=config.metric, set_point=config.set_point, v_min=config.v_min, v_max=config.v_max
        )
    return never if config.rule == "never" else partial(every, period=config.period)
