"""The store: one SQLite file with every rollout, its rewards as they arrive, and its uses."""

import errno
import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    Insert,
    bindparam,
    create_engine,
    delete,
    event,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DatabaseError, IntegrityError, OperationalError

from solera.errors import SoleraError
from solera.records import PROBE, Group, Reward, Rollout, Sampling, Use
from solera.store.encoding import decode, encode
from solera.store.schema import metadata, rewards, rollouts, to_draw, uses

_ROLLOUT_COLUMNS = (
    "id", "prompt_key", "lineage", "version", "origin", "finish_reason", "temperature", "max_tokens", "top_p",
    "created", "sequences",
)  # fmt: skip
_REWARD_COLUMNS = ("rollout_id", "part", "revision", "value", "source", "created")
_USE_COLUMNS = ("version", "rollout_id", "age", "advantage")

_r, _w = rollouts.c, rewards.c
_UNUSED = to_draw & exists().where(_w.rollout_id == _r.id)
_COUNT_UNUSED = select(func.count()).select_from(rollouts).where(_UNUSED).group_by(_r.prompt_key)
_LIST_UNUSED = select(_r.id, _r.prompt_key).where(_UNUSED).order_by(_r.id)
_READ = (
    select(
        _r.id, _r.prompt_key, _r.lineage, _r.origin, _r.finish_reason, _r.temperature, _r.max_tokens, _r.top_p,
        _r.sequences, _w.value, _w.part, _w.source, _w.revision,
    )
    .join(rewards, _w.rollout_id == _r.id)
    .order_by(_r.id, _w.part, _w.revision)
)  # fmt: skip
RECENT = 16_384
"""Most rollouts kept in memory between being written and being drawn."""
_COUNT_USES = (
    update(rollouts)
    .where(_r.id.in_(select(uses.c.rollout_id).where(uses.c.version == bindparam("now"))))
    .values(uses=_r.uses + 1)
)


class Ledger:
    """The Store protocol over SQLite. What `add`, `add_reward` and `record` have returned from outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine = create_engine(f"sqlite:///{path}")
        event.listen(self._engine, "connect", _prepare)
        event.listen(self._engine, "begin", _begin)
        try:
            metadata.create_all(self._engine)
        except OperationalError as error:
            raise OSError(errno.EIO, f"cannot be used as a store: {error.orig}", str(path)) from error
        except DatabaseError as error:
            raise SoleraError(f"{path}: cannot be used as a store: {error.orig}") from error
        self._connection = self._engine.connect()
        self._add_rollouts = Many(self._engine, insert(rollouts), _ROLLOUT_COLUMNS)
        self._add_rewards = Many(self._engine, insert(rewards), _REWARD_COLUMNS)
        self._add_uses = Many(self._engine, insert(uses), _USE_COLUMNS)
        self._recent: dict[int, Rollout] = {}
        """Written here, not yet drawn, and given no further reward since: what a query would find, while no one else
        writes to the file."""
        with self._transaction():
            self._others_wrote = self._data_version()

    def add(self, new: list[Rollout]) -> list[int]:
        now = time.time()
        for rollout in new:
            parts = {(reward.part, reward.revision) for reward in rollout.rewards}
            if len(parts) < len(rollout.rewards):
                raise SoleraError(
                    f"rollout of {rollout.prompt_key!r}: two of its rewards have the same part: give them names"
                )
        with self._transaction(write=True):
            first = (self._connection.scalar(select(func.max(rollouts.c.id))) or 0) + 1
            numbered = list(enumerate(new, first))
            self._add_rollouts.run(self._connection, [_rollout_row(i, rollout, now) for i, rollout in numbered])
            graded = [_reward_row(i, reward, now) for i, rollout in numbered for reward in rollout.rewards]
            self._add_rewards.run(self._connection, graded)
        drawable = [(i, rollout) for i, rollout in numbered if rollout.origin != PROBE]
        self._recent.update(drawable[: RECENT - len(self._recent)])
        return [i for i, _ in numbered]

    def add_reward(self, rollout_id: int, reward: Reward) -> None:
        try:
            with self._transaction(write=True):
                self._add_rewards.run(self._connection, [_reward_row(rollout_id, reward, time.time())])
            self._recent.pop(rollout_id, None)
        except IntegrityError as error:
            raise SoleraError(
                f"{self.path}: reward {reward.part!r} revision {reward.revision} for rollout {rollout_id}: "
                "no such rollout, or that revision is there already"
            ) from error

    def waiting(self, group_size: int) -> int:
        with self._transaction():
            return sum(count // group_size for count in self._connection.scalars(_COUNT_UNUSED))

    def draw(self, groups: int, group_size: int) -> list[Group]:
        with self._transaction():
            unused = self._connection.execute(_LIST_UNUSED).all()
            chosen = _first_groups(unused, groups, group_size)
            ids = [id_ for _, members in chosen for id_ in members]
            if (now := self._data_version()) != self._others_wrote:
                self._recent, self._others_wrote = {}, now
            if self._recent.keys() >= set(ids):
                found = {id_: self._recent.pop(id_).numbered(id_) for id_ in ids}
            else:
                found = self._read(set(ids))
        return [Group(key, tuple(found[id_] for id_ in members)) for key, members in chosen]

    def read(self, ids: list[int]) -> list[Rollout]:
        with self._transaction():
            return list(self._read(set(ids)).values())

    def record(self, used: list[Use]) -> None:
        if not used:
            return
        assert all(use.version == used[0].version for use in used), "uses of one step"
        with self._transaction(write=True):
            self._add_uses.run(self._connection, [(u.version, u.rollout_id, u.age, u.advantage) for u in used])
            self._connection.execute(_COUNT_USES, {"now": used[0].version})

    def watermark(self) -> int:
        with self._transaction():
            return self._connection.scalar(select(func.max(_r.id))) or 0

    def rewind(self, watermark: int, version: int, lineage: str | None = None) -> None:
        """Undo what a run did after the checkpoint it resumes from: uses from `version` on are forgotten, what it wrote
        itself after `watermark` is not drawn again. Every reward and everything of other origin stays; a task may have
        given its rollouts an origin of their own, so that the run's lineage tells them too."""
        if self.watermark() < watermark:
            raise SoleraError(
                f"{self.path}: the checkpoint was written with {watermark} rollouts in it, but it holds "
                f"{self.watermark()}: put the run's own store back"
            )
        undone = uses.c.version >= version
        times = select(uses.c.rollout_id, func.count().label("n")).where(undone).group_by(uses.c.rollout_id).subquery()
        with self._transaction(write=True):
            fewer = update(rollouts).where(_r.id == times.c.rollout_id).values(uses=_r.uses - times.c.n)
            self._connection.execute(fewer)
            self._connection.execute(delete(uses).where(undone))
            later = (_r.id > watermark) & (_r.origin.in_(("self", PROBE)) | (_r.lineage == lineage))
            self._connection.execute(update(rollouts).where(later).values(superseded=1))

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[None]:
        """All or none; a full disk or a damaged file is said in one line."""
        self._connection.info["write"] = write
        try:
            with self._connection.begin():
                yield
        except IntegrityError:
            raise
        except DatabaseError as error:
            if isinstance(error, OperationalError):  # a full disk, a lock, a disk that fails
                raise OSError(errno.EIO, f"the store cannot be used: {error.orig}", str(self.path)) from error
            raise SoleraError(f"{self.path}: the store cannot be used: {error.orig}") from error

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def _data_version(self) -> int:
        """A number that SQLite changes when another connection has written to the file."""
        return int(self._connection.exec_driver_sql("PRAGMA data_version").scalar_one())

    def _read(self, ids: set[int]) -> dict[int, Rollout]:
        """Rollouts with their rewards."""
        rows = self._connection.execute(_READ.where(_among(_r.id, ids)))
        found = {}
        for id_, same in groupby(rows, key=itemgetter(0)):
            if id_ in ids:
                lines = list(same)
                found[id_] = _rollout(tuple(lines[0])[:9], tuple(Reward(*tuple(line)[9:]) for line in lines))
        return found


class Many:
    """One statement for many rows, compiled once; rows are tuples in the order of `columns`, given to the driver."""

    def __init__(self, engine: Engine, statement: Insert, columns: Items[str]) -> None:
        compiled = statement.compile(dialect=engine.dialect, column_keys=list(columns))
        assert compiled.positiontup == list(columns), "give the columns in the statement's own order"
        self._sql = str(compiled)

    def run(self, connection: Connection, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            connection.exec_driver_sql(self._sql, rows)


def _among(column: Any, ids: Collection[int]) -> Any:
    """Ids drawn together mostly lie together: then a range is asked for, which is faster and may hold others too."""
    dense = ids and max(ids) - min(ids) < 4 * len(ids)
    return column.between(min(ids), max(ids)) if dense else column.in_(ids)


def _first_groups(unused: Items[Any], groups: int, group_size: int) -> list[tuple[str, list[int]]]:
    """Complete groups of equal prompt key, members first in first out, groups in the order of their first member."""
    filling: dict[str, list[int]] = {}
    formed: list[tuple[str, list[int]]] = []
    for id_, key in unused:
        members = filling.setdefault(key, [])
        members.append(id_)
        if len(members) == group_size:
            formed.append((key, filling.pop(key)))
    return sorted(formed, key=lambda group: group[1][0])[:groups]


def _rollout_row(id_: int, rollout: Rollout, now: float) -> tuple[Any, ...]:
    sampling = rollout.sampling
    drawn = (sampling.temperature, sampling.max_tokens, sampling.top_p) if sampling else (None, None, None)
    return (
        id_, rollout.prompt_key, rollout.lineage, rollout.version, rollout.origin, rollout.finish_reason, *drawn, now,
        encode(rollout.sequences),
    )  # fmt: skip


def _reward_row(rollout_id: int, reward: Reward, now: float) -> tuple[Any, ...]:
    return rollout_id, reward.part, reward.revision, reward.value, reward.source, now


def _rollout(row: Any, graded: tuple[Reward, ...]) -> Rollout:
    id_, prompt_key, lineage, origin, finish_reason, temperature, max_tokens, top_p, sequences = row
    sampling = None if temperature is None else _sampling(temperature, max_tokens, top_p)
    return Rollout(prompt_key, decode(sequences), graded, lineage, origin, finish_reason, sampling, id_)


_sampling = cache(Sampling)  # a run has one or two, a batch hundreds of rollouts


def _begin(connection: Connection) -> None:
    """A writer takes the lock first, so that what it has read before writing still holds."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.info.get("write") else "BEGIN")


def _prepare(connection: Any, _: object) -> None:
    """Write-ahead log: a killed process loses nothing it was told is written, and readers do not block the writer."""
    connection.isolation_level = None  # transactions begin where we say, not where the driver guesses
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=30000"):
        connection.execute(f"PRAGMA {pragma}")
