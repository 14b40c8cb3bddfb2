"""When the engine gets new weights: pure functions of where the run stands."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from solera.config import SyncConfig


@dataclass(frozen=True)
class SyncState:
    """What the engine holds, how often it was given weights (the first time included), and whether it is time again."""

    due: bool = True
    engine_version: int = 0
    count: int = 0

    def done(self, version: int) -> "SyncState":
        """The state after the engine took `version`."""
        return SyncState(due=False, engine_version=version, count=self.count + 1)


SyncRule = Callable[[SyncState, int], SyncState]
"""(state, version the learner has reached) -> state with `due` decided."""


def every(state: SyncState, version: int, *, period: int) -> SyncState:
    """Due once the learner has learned from `period` batches since the last sync: data of age 0 … period−1."""
    return SyncState(version - state.engine_version >= period, state.engine_version, state.count)


def never(state: SyncState, version: int) -> SyncState:
    """The engine keeps the weights it started with; all data is of version 0."""
    return SyncState(False, state.engine_version, state.count)


def sync_rule(config: SyncConfig) -> SyncRule:
    return never if config.rule == "never" else partial(every, period=config.period)
