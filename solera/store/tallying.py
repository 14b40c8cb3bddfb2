"""Sum the tokens of the rollouts that the run's own engine wrote for training, by what became of them.

Each of them has its tokens in the column `tokens`. Rollouts of an earlier version of Solera have none there, and
neither have imported ones and probes; they are not counted.
"""

from typing import Any

from sqlalchemy import Connection, case, func, literal, select

from solera.protocols import Tally
from solera.store.schema import rollouts, to_draw, uses

_r, _u = rollouts.c, uses.c


def tally(
    connection: Connection, after: int, since: int, reached: int, now: int, drops_late: bool, max_age: int | None
) -> Tally:
    """See `Store.tally`. With `drops_late`, rollouts of problems up to the last one used are not drawn any more."""
    trained, masked, last = first_uses(connection, since, now, only_new=True)
    reached = max(reached, last)
    late = (_r.admission <= reached) if drops_late else literal(False)
    old = (_r.version < now - max_age) if max_age is not None else literal(False)
    reason = case((late, "leftover"), (old, "too_old"), else_="waiting")
    undrawn = select(reason, func.sum(_r.tokens)).where(to_draw, _r.tokens.is_not(None)).group_by(reason)
    found = {name: int(tokens) for name, tokens in connection.execute(undrawn)}
    waiting, leftover, too_old = (found.get(name, 0) for name in ("waiting", "leftover", "too_old"))
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
    masked = case((_u.advantage.is_(None), 1), else_=0)
    query = (
        select(masked, func.sum(_r.tokens), func.max(_r.admission))
        .select_from(times)
        .join(rollouts, (_r.id == times.c.rollout_id) & _r.tokens.is_not(None))
        .join(uses, (_u.rollout_id == times.c.rollout_id) & (_u.version == times.c.first))
        .group_by(masked)
    )
    found = {
        kind: rest for kind, *rest in connection.execute(query.where(_r.uses == times.c.times) if only_new else query)
    }
    last = max((int(admission) for _, admission in found.values()), default=-1)
    return *(_whole(found[kind][0]) if kind in found else 0 for kind in (0, 1)), last  # type: ignore[return-value]


def _whole(value: Any) -> int:
    return 0 if value is None else int(value)
