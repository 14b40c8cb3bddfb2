"""The store: one SQLite file with every rollout, its rewards as they arrive, and its uses."""

import time
from collections import defaultdict
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from sqlalchemy import Row, bindparam, create_engine, event, exists, func, insert, select, update
from sqlalchemy.exc import DatabaseError, IntegrityError

from solera.errors import SoleraError
from solera.records import Group, Reward, Rollout, Sampling, Use
from solera.store.encoding import decode, encode
from solera.store.schema import metadata, rewards, rollouts, uses

_REWARDED = exists().where(rewards.c.rollout_id == rollouts.c.id)


class Ledger:
    """The Store protocol over SQLite. What `add`, `add_reward` and `record` have returned from outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine = create_engine(f"sqlite:///{path}")
        event.listen(self._engine, "connect", _prepare)
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        try:
            metadata.create_all(self._engine)
        except DatabaseError as error:
            raise SoleraError(f"{path}: cannot be used as a store: {error.orig}") from error
        self._connection = self._engine.connect()

    def add(self, new: list[Rollout]) -> list[int]:
        now = time.time()
        with self._connection.begin():
            first = (self._connection.scalar(select(func.max(rollouts.c.id))) or 0) + 1
            ids = list(range(first, first + len(new)))
            if new:
                rows = [_rollout_row(id_, rollout, now) for id_, rollout in zip(ids, new, strict=True)]
                self._connection.execute(insert(rollouts), rows)
            graded = [
                _reward_row(id_, r, now) for id_, rollout in zip(ids, new, strict=True) for r in rollout.rewards
            ]
            if graded:
                self._connection.execute(insert(rewards), graded)
        return ids

    def add_reward(self, rollout_id: int, reward: Reward) -> None:
        try:
            with self._connection.begin():
                self._connection.execute(insert(rewards), [_reward_row(rollout_id, reward, time.time())])
        except IntegrityError as error:
            raise SoleraError(
                f"{self.path}: reward {reward.part!r} revision {reward.revision} for rollout {rollout_id}: "
                "no such rollout, or that revision is there already"
            ) from error

    def waiting(self, group_size: int) -> int:
        query = (
            select(func.count()).select_from(rollouts).where(rollouts.c.uses == 0, _REWARDED)
            .group_by(rollouts.c.prompt_key)
        )  # fmt: skip
        with self._connection.begin():
            return sum(count // group_size for count in self._connection.scalars(query))

    def draw(self, groups: int, group_size: int) -> list[Group]:
        with self._connection.begin():
            chosen = _first_groups(self._unused(), groups, group_size)
            found = self._read([id_ for _, members in chosen for id_ in members])
        return [Group(key, tuple(found[id_] for id_ in members)) for key, members in chosen]

    def record(self, used: list[Use]) -> None:
        if not used:
            return
        count = update(rollouts).where(rollouts.c.id == bindparam("used_id")).values(uses=rollouts.c.uses + 1)
        with self._connection.begin():
            self._connection.execute(
                insert(uses),
                [
                    {"rollout_id": u.rollout_id, "version": u.version, "age": u.age, "advantage": u.advantage}
                    for u in used
                ],
            )
            self._connection.execute(count, [{"used_id": u.rollout_id} for u in used])

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def _unused(self) -> Items[Row[tuple[int, str]]]:
        query = (
            select(rollouts.c.id, rollouts.c.prompt_key).where(rollouts.c.uses == 0, _REWARDED).order_by(rollouts.c.id)
        )
        return self._connection.execute(query).all()

    def _read(self, ids: list[int]) -> dict[int, Rollout]:
        graded: dict[int, list[Reward]] = defaultdict(list)
        for row in self._connection.execute(select(rewards).where(rewards.c.rollout_id.in_(ids))):
            graded[row.rollout_id].append(Reward(row.value, row.part, row.source, row.revision))
        rows = self._connection.execute(select(rollouts).where(rollouts.c.id.in_(ids)))
        return {row.id: _rollout(row, tuple(graded[row.id])) for row in rows}


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


def _rollout_row(id_: int, rollout: Rollout, now: float) -> dict[str, Any]:
    sampling = rollout.sampling
    return {
        "id": id_, "prompt_key": rollout.prompt_key, "lineage": rollout.lineage, "version": rollout.version,
        "origin": rollout.origin, "finish_reason": rollout.finish_reason,
        "temperature": sampling and sampling.temperature, "max_tokens": sampling and sampling.max_tokens,
        "top_p": sampling and sampling.top_p, "created": now, "sequences": encode(rollout.sequences),
    }  # fmt: skip


def _reward_row(rollout_id: int, reward: Reward, now: float) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id, "part": reward.part, "revision": reward.revision, "value": reward.value,
        "source": reward.source, "created": now,
    }  # fmt: skip


def _rollout(row: Any, graded: tuple[Reward, ...]) -> Rollout:
    sampling = None if row.temperature is None else Sampling(row.temperature, row.max_tokens, row.top_p)
    return Rollout(
        row.prompt_key, decode(row.sequences), graded, row.lineage, row.origin, row.finish_reason, sampling, row.id
    )


def _prepare(connection: Any, _: object) -> None:
    """Write-ahead log: a killed process loses nothing it was told is written, and readers do not block the writer."""
    connection.isolation_level = None  # transactions begin where we say, not where the driver guesses
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=30000"):
        connection.execute(f"PRAGMA {pragma}")
