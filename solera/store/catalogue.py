"""What drawing asks of each rollout, held in memory and brought up to date by what is new."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, bindparam, func, select

from solera.records import PROBE
from solera.store.drawing import NO_AGE, Rows
from solera.store.schema import rewards, rollouts

_r, _w = rollouts.c, rewards.c
READ_TOGETHER = 50_000
"""Rows held as Python values at the same time."""
_NEW = (
    select(_r.id, _r.prompt_key, _r.origin, _r.lineage, _r.version, _r.uses)
    .where(_r.id > bindparam("after"), _r.superseded == 0, _r.origin != PROBE)
    .order_by(_r.id)
    .limit(READ_TOGETHER)
)
_later = rewards.alias()
_replaced = (
    select(_later.c.revision)
    .where(_later.c.rollout_id == _w.rollout_id, _later.c.part == _w.part, _later.c.revision > _w.revision)
    .exists()
)
_TOTALS = select(_w.rollout_id, func.sum(_w.value)).where(~_replaced).group_by(_w.rollout_id)
_TOTALS_OF_NEW = _TOTALS.where(_w.rollout_id > bindparam("after"), _w.rollout_id <= bindparam("last"))
_regraded = select(_later.c.rollout_id).where(_later.c.late > bindparam("late"))
_TOTALS_OF_REGRADED = _TOTALS.where(_w.rollout_id.in_(_regraded))
_LAST_LATE = select(func.max(_w.late)).where(_w.late.is_not(None))  # as the index has it
_TYPES: tuple[Any, ...] = (np.int64, np.int32, np.int16, np.int32, np.int32, np.float32)


class Catalogue:
    """About thirty bytes a rollout, and each prompt key once. Versions are those of `lineage`; others have no age."""

    def __init__(self, lineage: str) -> None:
        self.lineage = lineage
        self.rows = Rows(*[np.zeros(0, dtype) for dtype in _TYPES])
        self.keys: list[str] = []
        self._number: dict[str, int] = {}
        self._origins: dict[str, int] = {}
        self._last, self._late = 0, 0

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(self._origins)

    def refresh(self, connection: Connection) -> None:
        """Take in what was added and what was graded since the last time, by whomever."""
        late = connection.scalar(_LAST_LATE) or 0
        while new := connection.execute(_NEW, {"after": self._last}).all():
            between = {"after": self._last, "last": new[-1][0]}
            self._insert(new, dict(map(tuple, connection.execute(_TOTALS_OF_NEW, between))))
            self._last = new[-1][0]
        if late > self._late:
            self._regrade(dict(map(tuple, connection.execute(_TOTALS_OF_REGRADED, {"late": self._late}))))
            self._late = late

    def used(self, ids: Iterable[int]) -> None:
        """Count one more use of each."""
        self.rows.uses_R[np.isin(self.rows.id_R, list(ids))] += 1

    def _insert(self, new: Sequence[Any], reward: dict[int, float]) -> None:
        columns = zip(*[self._row(row, reward) for row in new], strict=True)
        more = Rows(*[np.array(column, dtype) for column, dtype in zip(columns, _TYPES, strict=True)])
        in_order = np.argsort(more.key_R, kind="stable")
        place = np.searchsorted(self.rows.key_R, more.key_R[in_order], side="right")
        cuts, first = np.unique(place, return_index=True)
        self.rows = Rows(*[_interleaved(old, cuts, added[in_order], first) for old, added in _pairs(self.rows, more)])

    def _row(self, row: Any, reward: dict[int, float]) -> tuple[float, ...]:
        id_, key, origin, lineage, version, uses = row
        if key not in self._number:
            self._number[key] = len(self.keys)
            self.keys.append(key)
        return (
            id_,
            self._number[key],
            self._origins.setdefault(origin, len(self._origins)),
            version if version is not None and lineage == self.lineage else NO_AGE,
            uses,
            reward.get(id_, np.nan),
        )

    def _regrade(self, reward: dict[int, float]) -> None:
        place = np.flatnonzero(np.isin(self.rows.id_R, list(reward)))
        self.rows.reward_R[place] = [reward[id_] for id_ in self.rows.id_R[place].tolist()]


def _interleaved(old_R: Any, cuts: Any, new_R: Any, first: Any) -> Any:
    """`np.insert` for values that go to few places: whole stretches are copied."""
    kept, *rest = np.split(old_R, cuts)
    pairs = zip(np.split(new_R, first[1:]), rest, strict=True)
    return np.concatenate([kept, *[piece for pair in pairs for piece in pair]])


def _pairs(old: Rows, new: Rows) -> Iterable[tuple[Any, Any]]:
    return zip(old, new, strict=True)
