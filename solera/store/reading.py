"""Read back what training used, from a store that another process may be writing to."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from sqlalchemy import Connection, func, select

from solera.records import Group, Reward, Rollout, Sequence, Use
from solera.store.database import Place, open_for_reading
from solera.store.encoding import decode
from solera.store.rows import rollout_of
from solera.store.schema import rewards, rollouts, uses

_r, _u, _w = rollouts.c, uses.c, rewards.c
_USED = (
    select(
        _r.id, _r.prompt_key, _r.lineage, _r.origin, _r.finish_reason, _u.version, _u.age, _u.advantage,
        _u.revision, _u.group_number, _w.value, _w.part, _w.source, _w.revision, _w.position, _w.sequence,
    )
    .join(uses, _u.rollout_id == _r.id)
    .outerjoin(rewards, _w.rollout_id == _r.id)
    .order_by(_r.id, _w.part, _w.revision)
)  # fmt: skip

_ALL = (
    select(
        _r.id, _r.prompt_key, _r.lineage, _r.origin, _r.finish_reason, _r.temperature, _r.max_tokens, _r.top_p,
        _r.sequences, _r.text, _r.admission, _r.created, _w.value, _w.part, _w.source, _w.revision, _w.position,
        _w.sequence,
    )
    .outerjoin(rewards, _w.rollout_id == _r.id)
    .where(_r.superseded == 0)
    .order_by(_r.id, _w.part, _w.revision)
)  # fmt: skip
Member = tuple[Rollout, Use]
READ_TOGETHER = 1_000
"""Rows in memory while all are read."""


@dataclass(frozen=True, eq=False)
class UsedGroup:
    """A group as one step used it. `uses` are in the order of the group's rollouts."""

    version: int
    group: Group
    uses: tuple[Use, ...]

    @property
    def differs(self) -> bool:
        """Whether its rewards are not all equal."""
        return len({rollout.reward for rollout in self.group.rollouts} - {None}) > 1

    @property
    def masked(self) -> bool:
        """Whether none of it had an effect on the step."""
        return all(use.advantage is None for use in self.uses)

    @property
    def guessed(self) -> bool:
        """Whether an earlier version of Solera recorded the step, which did not record the groups."""
        return any(use.group is None for use in self.uses)


class Reading:
    """A snapshot of a store. It writes nothing and does not block a running training."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rollouts(self) -> Iterator[tuple[Rollout, float]]:
        """Every rollout that was not superseded, by id, with the time it was added."""
        lines = self._connection.execution_options(yield_per=READ_TOGETHER).execute(_ALL)
        for _, same in groupby(lines, key=itemgetter(0)):
            rows = [tuple(line) for line in same]
            graded = tuple(Reward(*row[12:]) for row in rows if row[12] is not None)
            yield rollout_of(rows[0][:11], graded), rows[0][11]

    def lineage(self) -> str | None:
        """The lineage of the store's run, from the last rollout that it generated; `None` if it generated none."""
        own = select(_r.lineage).where(_r.origin == "self", _r.superseded == 0, _r.fingerprint.is_(None))
        return self._connection.scalar(own.order_by(_r.id.desc()).limit(1))

    def written_by(self, origin: str, lineage: str, version: int) -> dict[str, int]:
        """How many responses to each prompt key this author has written."""
        author = (_r.origin == origin) & (_r.lineage == lineage) & (_r.version == version) & (_r.superseded == 0)
        counted = select(_r.prompt_key, func.count()).where(author).group_by(_r.prompt_key)
        return dict(map(tuple, self._connection.execute(counted)))

    def versions(self) -> range:
        """The versions at which training used something, from the first to the last."""
        first, last = self._connection.execute(select(func.min(_u.version), func.max(_u.version))).one()
        return range(0) if first is None else range(first, last + 1)

    def used(self, version: int, group_size: int) -> list[UsedGroup]:
        """The groups of one step, without the sequences of their rollouts, which `with_sequences` adds.

        Steps that an earlier version of Solera recorded do not name their groups. These are guessed: a prompt's
        rollouts fill one group of `group_size` after the other.
        """
        known, prompts = defaultdict[int, list[Member]](list), defaultdict[str, list[Member]](list)
        for _, same in groupby(self._connection.execute(_USED.where(_u.version == version)), key=itemgetter(0)):
            lines = [tuple(line) for line in same]
            id_, key, lineage, origin, finish_reason, *recorded = lines[0][:10]
            graded = tuple(Reward(*line[10:]) for line in lines if line[10] is not None)
            rollout, use = Rollout(key, (), graded, lineage, origin, finish_reason, id=id_), Use(id_, *recorded)
            (prompts[key] if use.group is None else known[use.group]).append((rollout, use))
        guessed = [
            members[start : start + group_size]
            for members in prompts.values()
            for start in range(0, len(members), group_size)
        ]
        return [_used_group(version, members) for members in (*(known[number] for number in sorted(known)), *guessed)]

    def with_sequences(self, used: UsedGroup) -> UsedGroup:
        ids = [rollout.id for rollout in used.group.rollouts]
        rows = self._connection.execute(select(_r.id, _r.sequences, _r.text).where(_r.id.in_(ids)))
        found = {id_: (decode(data), text) for id_, data, text in rows}
        filled = tuple(_filled(rollout, *found[rollout.id]) for rollout in used.group.rollouts)
        return replace(used, group=Group(used.group.prompt_key, filled))


def _filled(rollout: Rollout, sequences: tuple[Sequence, ...], text: str | None) -> Rollout:
    return replace(rollout, sequences=sequences, text=text)


def _used_group(version: int, members: list[Member]) -> UsedGroup:
    rollouts = tuple(rollout for rollout, _ in members)
    return UsedGroup(version, Group(rollouts[0].prompt_key, rollouts), tuple(use for _, use in members))


@contextmanager
def reading(place: Place) -> Iterator[Reading]:
    """Open a store for reading only. A missing, damaged or foreign one is refused in one line."""
    with open_for_reading(place) as connection:
        yield Reading(connection)
