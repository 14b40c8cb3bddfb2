"""The columns that drawing needs of each rollout, kept in memory and updated with what is new."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from sqlalchemy import JSON, Connection, bindparam, case, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from solera.records import PROBE
from solera.store.drawing import NO_AGE, NO_VISIT, Rows
from solera.store.schema import rewards, rollouts


class Listed(FunctionElement[list[Any]]):
    """All values of a column as one value: a database returns a few large values much faster than many rows."""

    name = "listed"
    type = JSON()
    inherit_cache = True


@compiles(Listed)
def _spell_listed(listed: Any, compiler: Any, **options: Any) -> str:
    name = {"sqlite": "json_group_array", "postgresql": "json_agg"}[compiler.dialect.name]
    return f"{name}({compiler.process(listed.clauses, **options)})"


_r, _w = rollouts.c, rewards.c
READ_TOGETHER = 50_000
"""Ids whose rows are held as Python values at the same time."""
_own_version = case((_r.lineage == bindparam("lineage"), func.coalesce(_r.version, NO_AGE)), else_=NO_AGE)
_admission = func.coalesce(_r.admission, NO_VISIT)
_NEW = select(*map(Listed, (_r.id, _r.prompt_key, _r.origin, _own_version, _r.uses, _admission))).where(
    _r.id > bindparam("after"), _r.id <= bindparam("last"), _r.superseded == 0, _r.origin != PROBE
)
_later = rewards.alias()
_replaced = (
    select(_later.c.revision)
    .where(_later.c.rollout_id == _w.rollout_id, _later.c.part == _w.part, _later.c.revision > _w.revision)
    .exists()
)


def _totals_of(among: Callable[[Any], Any]) -> Any:
    """Looks up replaced rewards only for rollouts that have a revised one."""
    revised = _w.rollout_id.in_(select(_later.c.rollout_id).where(among(_later.c.rollout_id), _later.c.revision > 0))
    totals = select(_w.rollout_id, func.sum(_w.value)).where(among(_w.rollout_id), ~(revised & _replaced))
    return totals.group_by(_w.rollout_id).order_by(_w.rollout_id)


_graded_later = select(_later.c.rollout_id).where(_later.c.late > bindparam("late"))
_TOTALS_OF_NEW = _totals_of(lambda id_: (id_ > bindparam("after")) & (id_ <= bindparam("last")))
_TOTALS_OF_REGRADED = _totals_of(lambda id_: id_.in_(_graded_later))
_LAST_ID = select(func.max(_r.id))
_LAST_LATE = select(func.max(_w.late)).where(_w.late.is_not(None))  # matches the index
_TYPES: tuple[Any, ...] = (np.int64, np.int32, np.int16, np.int32, np.int32, np.float32, np.int32)


class Catalogue:
    """The columns in memory. They take about 35 bytes per rollout, plus each prompt key once. Versions belong to
    `lineage`; rollouts of other lineages have no age."""

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
        """Read what was added and rewarded since the last call, by any process."""
        late = connection.scalar(_LAST_LATE) or 0
        last = connection.scalar(_LAST_ID) or 0
        for after in range(self._last, last, READ_TOGETHER):
            self._insert(connection, {"after": after, "last": min(after + READ_TOGETHER, last)})
        self._last = last
        if late > self._late:
            _grade(self.rows, _totals(connection, _TOTALS_OF_REGRADED, {"late": self._late}))
            self._late = late

    def used(self, ids: Iterable[int]) -> None:
        """Count one more use of each."""
        self.rows.uses_R[np.isin(self.rows.id_R, list(ids))] += 1

    def _insert(self, connection: Connection, between: dict[str, int]) -> None:
        listed = connection.execute(_NEW, {"lineage": self.lineage, **between}).one()
        if not listed[0]:
            return
        by_id = np.argsort(listed[0])
        keys, origins = [[column[i] for i in by_id.tolist()] for column in listed[1:3]]
        self.keys += [key for key in dict.fromkeys(keys) if key not in self._number]
        ids, versions, uses, admissions = [np.array(column)[by_id] for column in (listed[0], *listed[3:])]
        numbers = _numbers(keys, self._number), _numbers(origins, self._origins)
        columns = (ids, *numbers, versions, uses, np.full(len(ids), np.nan), admissions)
        more = Rows(*[np.array(column, dtype) for column, dtype in zip(columns, _TYPES, strict=True)])
        _grade(more, _totals(connection, _TOTALS_OF_NEW, between))
        in_order = np.argsort(more.key_R, kind="stable")
        place = np.searchsorted(self.rows.key_R, more.key_R[in_order], side="right")
        cuts, first = np.unique(place, return_index=True)
        self.rows = Rows(*[_interleaved(old, cuts, added[in_order], first) for old, added in _pairs(self.rows, more)])


def _numbers(names: list[str], known: dict[str, int]) -> list[int]:
    """The number of each name. New names get the next numbers."""
    for name in dict.fromkeys(names):
        known.setdefault(name, len(known))
    return [known[name] for name in names]


def _totals(connection: Connection, query: Any, asked: dict[str, int]) -> list[tuple[int, float]]:
    """Ids and rewards directly from the driver, because SQLAlchemy's rows take twice as long."""
    with connection.execute(query, asked) as found:
        assert found.cursor is not None
        return list(found.cursor.fetchall())


def _grade(rows: Rows, totals: list[tuple[int, float]]) -> None:
    """Set the rewards of rows. `totals` may include ids that are not among them."""
    id_W, reward_W = np.array([id_ for id_, _ in totals]), np.array([reward for _, reward in totals])
    place = np.flatnonzero(np.isin(rows.id_R, id_W))
    rows.reward_R[place] = reward_W[np.searchsorted(id_W, rows.id_R[place])]


def _interleaved(old_R: Any, cuts: Any, new_R: Any, first: Any) -> Any:
    """`np.insert` for a few places: copies whole stretches."""
    kept, *rest = np.split(old_R, cuts)
    pairs = zip(np.split(new_R, first[1:]), rest, strict=True)
    return np.concatenate([kept, *[piece for pair in pairs for piece in pair]])


def _pairs(old: Rows, new: Rows) -> Iterable[tuple[Any, Any]]:
    return zip(old, new, strict=True)
