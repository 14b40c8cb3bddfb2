"""The store: every rollout, its rewards as they arrive, and its uses, in SQLite or PostgreSQL."""

import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, bindparam, delete, exists, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from solera.errors import SoleraError
from solera.folder.files import refuse_gone
from solera.protocols import Tally
from solera.records import PROBE, Group, PolicyVersion, Reward, Rollout, Use
from solera.store.bulk_insert import BulkInsert
from solera.store.database import Place, open_engine, place_in, transaction
from solera.store.encoding import encode
from solera.store.queue import Queue, Unused
from solera.store.rows import (
    REWARD_COLUMNS,
    ROLLOUT_COLUMNS,
    SET_ASIDE,
    USE_COLUMNS,
    fingerprint,
    reward_row,
    rollout_of,
    rollout_row,
    use_row,
)
from solera.store.schema import rewards, rollouts, to_draw, uses
from solera.store.tallying import tally

T = TypeVar("T")
_r, _w = rollouts.c, rewards.c
_UNUSED = to_draw & exists().where(_w.rollout_id == _r.id)
_waits = or_(_r.admission.is_(None), _r.admission > bindparam("reached"))
_LIST_UNUSED = select(_r.id, _r.prompt_key, _r.admission).where(_UNUSED, _waits).order_by(_r.id)
_COUNT_LEFTOVER = select(func.count()).select_from(rollouts).where(_UNUSED, _r.admission <= bindparam("reached"))
_REACHED = (  # a step uses later admissions than the steps before, so only the rows of the last steps are read
    select(func.max(_r.admission))
    .join(uses, uses.c.rollout_id == _r.id)
    .where(_r.admission.is_not(None), _r.superseded == 0)
    .group_by(uses.c.version)
    .order_by(uses.c.version.desc())
    .limit(1)
)
_READ = (
    select(
        _r.id, _r.prompt_key, _r.lineage, _r.origin, _r.finish_reason, _r.temperature, _r.max_tokens, _r.top_p,
        _r.sequences, _r.text, _r.admission, _w.value, _w.part, _w.source, _w.revision, _w.position,
        _w.sequence,
    )
    .join(rewards, _w.rollout_id == _r.id)
    .order_by(_r.id, _w.part, _w.revision)
)  # fmt: skip
LAST_ID = 2**31 - 1
"""Largest id that the tables can hold."""
RECENT = 16_384
"""Maximum number of rollouts kept in memory after they are written and before they are drawn."""
_LAST_ID = select(func.max(_r.id))
_KNOWN = select(_r.fingerprint, _r.id).where(_r.fingerprint.in_(bindparam("marks", expanding=True)))
_AMONG = _r.id.in_(bindparam("ids", expanding=True))
_WRITTEN_HERE = _r.fingerprint.is_(None)
_OWN = select(_r.id, _r.lineage, _r.sequences).where(_AMONG, _WRITTEN_HERE, _r.superseded == 0)
_STANDINGS = select(_r.id, _r.origin, _WRITTEN_HERE & (_r.superseded == 1)).where(_AMONG)
_REVISIONS = (
    select(_w.rollout_id, _w.part, _w.revision, _w.value, _w.source, _w.position, _w.sequence)
    .where(_w.rollout_id.in_(bindparam("ids", expanding=True)))
    .order_by(_w.revision)
)
_PARTS = select(_w.part).where(_w.rollout_id == bindparam("id")).distinct().order_by(_w.part)
IMPORTED_TOGETHER = 1_000
"""Rows that one query looks up."""
LISTED_TOGETHER = 1_000
"""Drawable rows that are read at a time."""
_LAST_LATE = select(func.max(_w.late)).where(_w.late.is_not(None))  # matches the index
_LATE = select(_w.late, _w.rollout_id).where(_w.late > bindparam("after"))
_COUNT_USES = (
    update(rollouts)
    .where(_r.id.in_(select(uses.c.rollout_id).where(uses.c.version == bindparam("now"))), _r.id < bindparam("before"))
    .values(uses=_r.uses + 1)
)
_COUNT_REWARDS = update(rollouts).where(_r.id == bindparam("id_")).values(rewards=_r.rewards + bindparam("more"))
_USED_BEFORE = select(func.count(), func.coalesce(func.sum(uses.c.rollout_id), 0)).where(
    uses.c.version < bindparam("version")
)


class Ledger:
    """Implements the Store protocol. Each rollout is drawn once, first in, first out.

    Once `add`, `add_reward` or `record` has returned, the data survives the end of the process.
    """

    selective = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self._engine = open_engine(place)
        self._connection = self._engine.connect()
        self._file = place.stat() if isinstance(place, Path) else None
        self._add_rollouts = BulkInsert(self._engine, insert(rollouts), ROLLOUT_COLUMNS)
        self._add_rewards = BulkInsert(self._engine, insert(rewards), REWARD_COLUMNS)
        self._add_counted = BulkInsert(self._engine, insert(rollouts), (*ROLLOUT_COLUMNS, "uses"))
        self._add_imports = BulkInsert(self._engine, insert(rollouts), (*ROLLOUT_COLUMNS, "fingerprint"))
        self._add_late = BulkInsert(self._engine, insert(rewards), (*REWARD_COLUMNS, "late"))
        self._add_uses = BulkInsert(self._engine, insert(uses), USE_COLUMNS)
        self._recent: dict[int, Rollout] = {}
        """Rollouts written here, not drawn yet, and without further rewards since: the same as a query would return."""
        self._queue: Queue | None = None
        self._groups: dict[int, int] = {}
        """Number of the group in which each rollout was last drawn."""
        with self.transaction():
            self._late = self._last_late()
            """Number of the last late reward that is known here."""

    def add(self, new: list[Rollout]) -> list[int]:
        refuse_equal_parts(new)
        now = time.time()
        with self.transaction(write=True):
            numbered = list(enumerate(new, self._last_id() + 1))
            self._add_rollouts.run(self._connection, [rollout_row(i, rollout, now) for i, rollout in numbered])
            self._add_their_rewards(numbered, now)
        self._remember((i, rollout) for i, rollout in numbered if rollout.origin != PROBE)
        return [i for i, _ in numbered]

    def add_at_once(self, rollouts: list[Rollout]) -> list[int]:
        return self.add(rollouts)

    def add_used(self, new: Mapping[int, Rollout], steps: Items[Items[Use]]) -> dict[int, int]:
        """Write rollouts together with the uses of finished steps, which refer to the rollouts by their ids in `new`.
        Returns the ids of the rollouts that no step has used."""
        now, times = time.time(), Counter(use.rollout_id for step in steps for use in step)
        with self.transaction(write=True):
            first = self._last_id() + 1
            number = {id_: i for i, id_ in enumerate(new, first)}
            rows = [(*rollout_row(number[id_], rollout, now), times[id_]) for id_, rollout in new.items()]
            self._add_counted.run(self._connection, rows)
            self._add_their_rewards(enumerate(new.values(), first), now)
            for step in steps:
                renamed = [
                    use._replace(rollout_id=number[use.rollout_id]) if use.rollout_id in number else use for use in step
                ]
                self._add_step(renamed, counted_from=first)
        left = {id_: i for id_, i in number.items() if id_ not in times}
        self._remember((i, new[id_]) for id_, i in left.items())
        return left

    def add_reward(self, rollout_id: int, reward: Reward) -> None:
        try:
            with self.transaction(write=True):
                self._refuse_unrewardable([rollout_id])
                late = self._last_late() + 1
                self._write_late([(*reward_row(rollout_id, reward, time.time(), late), late)])
        except IntegrityError as error:
            raise SoleraError(
                f"{self.place}: reward {reward.part!r} of rollout {rollout_id} already has revision {reward.revision}"
            ) from error

    def revise(self, given: Items[tuple[int, Reward]]) -> int:
        """Add or change rewards, all or none. A new reward replaces the previous value of its part.

        Numbers the revisions (`Reward.revision`) and skips rewards that change nothing. Returns how many were written.
        """
        with self.transaction(write=True):
            return self._revise(given)

    def unrewardable(self, ids: Items[int]) -> str | None:
        """Why one of these rollouts cannot be rewarded, or None. Runs in the open transaction."""
        found = {id_: rest for id_, *rest in self._connection.execute(_STANDINGS, {"ids": list(ids)})}
        for id_ in sorted(ids):
            if id_ not in found:
                return f"there is no rollout {id_}; the last is {self._last_id()}"
            origin, set_aside = found[id_]
            if origin == PROBE or set_aside:
                later = "was generated after the checkpoint that the run resumed from, so training does not use it"
                why = "belongs to a probe, which training does not use" if origin == PROBE else later
                return f"rollout {id_} {why}; solera data export lists the ids that can be rewarded"
        return None

    def parts(self, rollout_id: int) -> list[str]:
        """The parts of the rollout's reward, by name."""
        with self.transaction():
            return list(self._connection.scalars(_PARTS, {"id": rollout_id}))

    def add_imported(self, *files: Items[Rollout], over: bool = True) -> tuple[int, int]:
        """Write imported rollouts, all or none, each only once even if it is given again. Rewards of rollouts that are
        already there are revised; without `over`, they are only added for parts that have no value. Returns the number
        of new rollouts and of revised rewards."""
        with self.transaction(write=True):
            first = self._last_id() + 1
            revised = sum(self._import(new, over) for new in files)
            return self._last_id() + 1 - first, revised

    def add_samples(self, new: Items[Rollout]) -> None:
        """Write all of these as imported rollouts, or none. If a text is already there, this is another sample of it.
        An import of their export adds nothing."""
        with self.transaction(write=True):
            seen = Counter[bytes]()
            for some in batched(new, IMPORTED_TOGETHER):
                self._add_marked(self._marked_anew(some, seen))

    def missing(self, groups: int, group_size: int, reserve: int, now: PolicyVersion | None = None) -> int:
        with self.transaction(), closing(self.unused()) as unused:
            return self.queue().missing(unused, groups + reserve, group_size)

    def draw(self, groups: int, group_size: int, now: PolicyVersion | None = None) -> list[Group]:
        with self.transaction():
            with closing(self.unused()) as unused:
                chosen = self.queue().draw(unused, groups, group_size)
            return self.form(chosen)

    def queue(self) -> Queue:
        """What was used and left over so far. Runs in the open transaction."""
        if self._queue is None:
            reached = self._connection.scalar(_REACHED)
            reached = -1 if reached is None else reached
            self._queue = Queue(reached, self._connection.scalar(_COUNT_LEFTOVER, {"reached": reached}) or 0)
        return self._queue

    def unused(self) -> Generator[Unused, None, None]:
        """The rollouts that can be drawn, ordered by id. Reads little more than the caller consumes. Runs in the open
        transaction."""
        options, reached = {"yield_per": LISTED_TOGETHER}, self.queue().reached
        with self._connection.execute(_LIST_UNUSED, {"reached": reached}, execution_options=options) as rows:
            yield from map(tuple, rows)

    def passed_over(self) -> Mapping[str, int]:
        return {"leftover": self._queue.leftover} if self._queue is not None and self._queue.leftover else {}

    def form(self, chosen: list[tuple[str, list[int]]]) -> list[Group]:
        """Build groups from prompt keys and the ids of their members. Runs in the open transaction."""
        self._forget_regraded()
        self._groups = {id_: number for number, (_, members) in enumerate(chosen) for id_ in members}
        ids = {id_ for _, members in chosen for id_ in members}
        unknown = ids - self._recent.keys()
        found = {id_: self._recent.pop(id_).numbered(id_) for id_ in ids - unknown}
        if unknown:
            found |= self._read(unknown)
        return [Group(key, tuple(found[id_] for id_ in members)) for key, members in chosen]

    def fetch(self, ids: list[int]) -> list[Rollout]:
        with self.transaction():
            return list(self._read(set(ids)).values())

    def record(self, used: list[Use]) -> None:
        if not used:
            return
        assert all(use.version == used[0].version for use in used), "uses of one step"
        with self.transaction(write=True):
            self._add_step(in_groups(used, self._groups))
        self.pass_by(used)

    def pass_by(self, used: Items[Use]) -> None:
        """Mark the unused rollouts of earlier visits as leftovers."""
        if self._queue is not None:
            self._queue.used(use.rollout_id for use in used)

    def flush(self) -> None:
        """Check that the file still exists. Everything is already written."""
        self._refuse_gone()

    def watermark(self) -> int:
        with self.transaction():
            return self._last_id()

    def uses_before(self, version: int) -> tuple[int, int]:
        with self.transaction():
            return count_uses(self._connection, version)

    def tally(
        self, after: int, since: int, reached: int, now: PolicyVersion, drops_late: bool = True,
        max_age: int | None = None,
    ) -> Tally:  # fmt: skip
        with self.transaction() as connection:
            return tally(connection, after, since, reached, now.version, drops_late, max_age)

    def rewind(self, watermark: int, version: int, lineage: str | None = None) -> None:
        """Undo what a run did after the checkpoint that it resumes from. Uses from `version` on are deleted, and
        rollouts that the run generated after `watermark` are not drawn again. All rewards and all imported rollouts
        stay. The run's own rollouts are recognised by origin and by lineage, because a task may set its own origin.
        Without a checkpoint the lineage is unknown; then all lineages count, except of imported rollouts."""
        if self.watermark() < watermark:
            raise SoleraError(
                f"{self.place}: the checkpoint expects {watermark} rollouts, but the store has "
                f"{self.watermark()}: restore the run's own store"
            )
        undone = uses.c.version >= version
        times = select(uses.c.rollout_id, func.count().label("n")).where(undone).group_by(uses.c.rollout_id).subquery()
        with self.transaction(write=True):
            fewer = update(rollouts).where(_r.id == times.c.rollout_id).values(uses=_r.uses - times.c.n)
            self._connection.execute(fewer)
            self._connection.execute(delete(uses).where(undone))
            of_the_run = _r.lineage.is_not(None) if lineage is None else _r.lineage == lineage
            written_here = _r.fingerprint.is_(None) & (_r.origin.in_(("self", PROBE)) | of_the_run)
            later = update(rollouts).where(_r.id > watermark, written_here, _r.superseded == 0)
            self._connection.execute(later.values(superseded=1, seal=_r.seal + SET_ASIDE))
        self._queue = None

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[Connection]:
        self._refuse_gone()
        with transaction(self._connection, self.place, write):
            yield self._connection
        self._refuse_gone()

    def _refuse_gone(self) -> None:
        """Refuse to write to a deleted file. SQLite would keep writing without an error. Called before writing, so that
        nothing is lost, and after writing, so that no caller believes that lost data was written."""
        if self._file is not None and isinstance(self.place, Path):
            refuse_gone(self.place, self._file)

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def _add_their_rewards(self, numbered: Iterable[tuple[int, Rollout]], now: float) -> None:
        graded = [reward_row(i, reward, now) for i, rollout in numbered for reward in rollout.rewards]
        self._add_rewards.run(self._connection, graded)

    def _add_step(self, used: Items[Use], counted_from: int = LAST_ID) -> None:
        """Write the uses of one step. Rollouts from `counted_from` on already include them in their count."""
        self._add_uses.run(self._connection, list(map(use_row, used)))
        if any(use.rollout_id < counted_from for use in used):
            self._connection.execute(_COUNT_USES, {"now": used[0].version, "before": counted_from})

    def _remember(self, drawable: Iterable[tuple[int, Rollout]]) -> None:
        self._recent.update(islice(drawable, RECENT - len(self._recent)))

    def _last_id(self) -> int:
        return self._connection.scalar(_LAST_ID) or 0

    def _import(self, new: Items[Rollout], over: bool) -> int:
        seen, revised = Counter[bytes](), 0
        for some in batched(new, IMPORTED_TOGETHER):
            marked = {fingerprint(rollout, seen): rollout for rollout in some}
            known = self._known(marked)
            self._add_marked({mark: rollout for mark, rollout in marked.items() if mark not in known})
            again = [(known[m], r) for m in marked if m in known for r in marked[m].rewards]
            revised += self._revise(again, over)
        return revised

    def _marked_anew(self, new: Items[Rollout], seen: Counter[bytes]) -> dict[bytes, Rollout]:
        """The samples by fingerprints that no row has yet. Samples of a text are numbered from the number of those
        stored."""
        marks, left = [b""] * len(new), list(range(len(new)))
        while left:
            for place in left:
                marks[place] = fingerprint(new[place], seen)
            stored = self._stored([marks[place] for place in left])
            left = [place for place in left if marks[place] in stored]
        return dict(zip(marks, new, strict=True))

    def _add_marked(self, marked: Mapping[bytes, Rollout]) -> None:
        """Write imported rollouts with their rewards, by fingerprint."""
        now, numbered = time.time(), list(enumerate(marked.items(), self._last_id() + 1))
        rows = [(*rollout_row(i, rollout, now, mark), mark) for i, (mark, rollout) in numbered]
        self._add_imports.run(self._connection, rows)
        self._add_their_rewards([(i, rollout) for i, (_, rollout) in numbered], now)

    def _known(self, marked: dict[bytes, Rollout]) -> dict[bytes, int]:
        """Ids of rollouts that were imported before, or that the run generated itself and that an export brings
        back."""
        back = {m: (r.id, r.lineage, bytes(encode(r.sequences))) for m, r in marked.items() if r.id and r.lineage}
        rows = self._connection.execute(_OWN, {"ids": [id_ for id_, *_ in back.values()]}) if back else ()
        own = {(id_, lineage, bytes(sequences)) for id_, lineage, sequences in rows}
        return self._stored(list(marked)) | {mark: claim[0] for mark, claim in back.items() if claim in own}

    def _stored(self, marks: list[bytes]) -> dict[bytes, int]:
        """Ids of imported rollouts by their fingerprints."""
        return dict(map(tuple, self._connection.execute(_KNOWN, {"marks": marks})))

    def _revise(self, given: Items[tuple[int, Reward]], over: bool = True) -> int:
        latest: dict[tuple[int, str], Any] = {}
        for some in batched({rollout_id for rollout_id, _ in given}, IMPORTED_TOGETHER):
            self._refuse_unrewardable(some)
            for row in self._connection.execute(_REVISIONS, {"ids": list(some)}):  # the latest comes last
                latest[row.rollout_id, row.part] = row[2:]
        rows, number, now = list[tuple[Any, ...]](), self._last_late(), time.time()
        for rollout_id, reward in given:
            revision, *held = latest.get((rollout_id, reward.part), (-1, None))
            says = [reward.value, reward.source, reward.position, reward.sequence]
            if held != says and (over or revision < 0):
                latest[rollout_id, reward.part] = revision + 1, *says
                revised = replace(reward, revision=revision + 1)
                number += 1
                rows.append((*reward_row(rollout_id, revised, now, number), number))
        self._write_late(rows)
        return len(rows)

    def _write_late(self, rows: Items[tuple[Any, ...]]) -> None:
        self._add_late.run(self._connection, rows)
        if counted := Counter(row[0] for row in rows):
            self._connection.execute(_COUNT_REWARDS, [{"id_": id_, "more": more} for id_, more in counted.items()])

    def _refuse_unrewardable(self, ids: Items[int]) -> None:
        if complaint := self.unrewardable(ids):
            raise SoleraError(f"{self.place}: {complaint}")

    def _last_late(self) -> int:
        return self._connection.scalar(_LAST_LATE) or 0

    def _forget_regraded(self) -> None:
        """Drop rollouts from memory that received a reward since, here or in another process, so that they are read
        again."""
        for number, rollout_id in self._connection.execute(_LATE, {"after": self._late}):
            self._recent.pop(rollout_id, None)
            self._late = max(self._late, number)

    def _read(self, ids: set[int]) -> dict[int, Rollout]:
        """Rollouts with their rewards."""
        rows = self._connection.execute(_READ.where(_among(_r.id, ids)))
        found = {}
        for id_, same in groupby(rows, key=itemgetter(0)):
            if id_ in ids:
                lines = list(same)
                found[id_] = rollout_of(tuple(lines[0])[:11], tuple(Reward(*tuple(line)[11:]) for line in lines))
        return found


def count_uses(connection: Connection, before: int) -> tuple[int, int]:
    """The number of uses of earlier versions, and the sum of their rollouts' ids."""
    count, total = connection.execute(_USED_BEFORE, {"version": before}).one()
    return int(count), int(total)


def open_store(run: Path | str) -> Ledger:
    """The store of the run in this folder, during or after the run: `open_store("runs/NAME").revise([(5,
    Reward(1.0))])`."""
    return Ledger(place_in(Path(run)))


def refuse_equal_parts(new: Items[Rollout]) -> None:
    for rollout in new:
        given = rollout.rewards
        if len(given) > 1 and len({(reward.part, reward.revision) for reward in given}) < len(given):
            raise SoleraError(
                f"rollout of {rollout.prompt_key!r}: two of its rewards have the same part: give them "
                "different part names"
            )


def batched(items: Iterable[T], count: int) -> Iterator[tuple[T, ...]]:
    rest = iter(items)
    while some := tuple(islice(rest, count)):
        yield some


def _among(column: Any, ids: Collection[int]) -> Any:
    """Ids that are drawn together are mostly adjacent. Then a range query is faster; it may return other ids as
    well."""
    dense = ids and max(ids) - min(ids) < 4 * len(ids)
    return column.between(min(ids), max(ids)) if dense else column.in_(ids)


def in_groups(used: Items[Use], groups: Mapping[int, int]) -> list[Use]:
    """Each use with the number of the group that its rollout was drawn in, if it has none yet."""
    return [use if use.group is not None else Use(*use[:-1], groups.get(use.rollout_id)) for use in used]
