"""Sum the tokens of the rollouts that the run's own engine wrote for training, by what became of them.

Each of them has its tokens in the column `tokens`. Rollouts of an earlier version of Solera have none there, and
neither have imported ones and probes; they are not counted.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, case, false, func, select

from solera.protocols import Tally
from solera.store.schema import rollouts, to_draw, uses

_r, _u = rollouts.c, uses.c


def tally(
    connection: Connection, after: int, since: int, reached: int, now: int, drops_late: bool, max_age: int | None
) -> Tally:
    """See `Store.tally`. With `drops_late`, rollouts of problems up to the last one used are not drawn any more."""
    trained, masked, last = first_uses(connection, since, now, only_new=True)
    reached = max(reached, last)
    late = (_r.admission <= reached) if drops_late else false()
    old = (_r.version < now - max_age) if max_age is not None else false()
    sums = select(_sum(~late & ~old), _sum(late), _sum(~late & old)).where(to_draw)
    waiting, leftover, too_old = map(_whole, connection.execute(sums).one())
    return Tally(stored(connection, after), trained, masked, waiting, leftover, too_old, reached)


def stored(connection: Connection, after: int, upto: int | None = None, superseded: bool = False) -> int:
    """Tokens of the rollouts with ids above `after`; with `superseded`, of those that resumes have set aside."""
    which = [
        _r.id > after,
        *([_r.id <= upto] if upto is not None else []),
        *([_r.superseded == 1] if superseded else []),
    ]
    return _whole(connection.scalar(select(func.sum(_r.tokens)).where(*which)))


def first_uses(connection: Connection, since: int, before: int, only_new: bool = False) -> tuple[int, int, int]:
    """Tokens of the rollouts that steps from version `since` up to `before` used first: in the loss, and not in it.
    Also the last problem of the stream among them, or -1. With `only_new`, rollouts with earlier uses are left out."""
    times = (
        select(_u.rollout_id, func.min(_u.version).label("first"), func.count().label("times"))
        .where(_u.version >= since, _u.version < before).group_by(_u.rollout_id).subquery()
    )  # fmt: skip
    masked = _u.advantage.is_(None)
    query = (
        select(_sum(~masked), _sum(masked), func.max(_r.admission))
        .select_from(times)
        .join(rollouts, (_r.id == times.c.rollout_id) & _r.tokens.is_not(None))
        .join(uses, (_u.rollout_id == times.c.rollout_id) & (_u.version == times.c.first))
    )
    found = connection.execute(query.where(_r.uses == times.c.times) if only_new else query).one()
    return _whole(found[0]), _whole(found[1]), -1 if found[2] is None else int(found[2])


def _sum(condition: ColumnElement[bool]) -> Any:
    return func.sum(case((condition, _r.tokens), else_=0))


def _whole(value: Any) -> int:
    return 0 if value is None else int(value)
