"""Check that a store is intact, and that it fits a checkpoint.

A store is intact if its file is, if no row is missing or orphaned, and if every row matches its checksum.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import Connection, Table, exists, func, select

from solera.errors import SoleraError
from solera.folder.account import LEFTOVER, MASKED, SUPERSEDED, TOO_OLD, Account
from solera.records import Rollout
from solera.store.database import Place, open_for_reading
from solera.store.encoding import decode
from solera.store.ledger import Ledger, count_uses
from solera.store.rows import SET_ASIDE, checksum_of_reward, checksum_of_use, seal_of
from solera.store.schema import rewards, rollouts, uses
from solera.store.tallying import first_uses, stored

_r, _w, _u = rollouts.c, rewards.c, uses.c
_SEALED = (
    _r.id, _r.prompt_key, _r.lineage, _r.version, _r.origin, _r.finish_reason, _r.temperature, _r.max_tokens, _r.top_p,
    _r.created, _r.text, _r.admission, _r.fingerprint,
)  # fmt: skip
_ROLLOUTS = select(_r.sequences, _r.checksum, _r.superseded, _r.seal, _r.tokens, *_SEALED).order_by(_r.id)
_REWARDS = select(
    _w.checksum, _w.rollout_id, _w.part, _w.revision, _w.value, _w.source, _w.created, _w.position, _w.late, _w.sequence
).order_by(_w.rollout_id, _w.part, _w.revision)
_USES = select(
    _u.checksum, _u.version, _u.rollout_id, _u.age, _u.advantage, _u.revision, _u.group_number
).order_by(_u.version, _u.rollout_id)  # fmt: skip
_DIFFERS = "damaged: the checksum differs"
READ_TOGETHER = 1_000


@dataclass
class Verified:
    """How much was checked, and what is wrong with it."""

    rollouts: int = 0
    unsigned: int = 0
    """Rollouts of an earlier version of Solera, which wrote no checksums, or only those of tokens."""
    complaints: list[str] = field(default_factory=list)


class Needs(NamedTuple):
    """What a store contained when the checkpoint of `version` was written: the id of the last rollout, and
    `uses_before(version)` and the account of tokens, which older checkpoints do not record."""

    version: int
    watermark: int
    uses: tuple[int, int] | None
    account: Account | None = None


def verify(place: Place, checkpoint: Needs | None = None) -> Verified:
    """Read the whole store, and compare it with the run's newest checkpoint."""
    found = Verified()
    with open_for_reading(place) as connection:
        found.complaints += [
            *_integrity(connection), *_orphans(connection),
            *_miscounted(connection, uses, "uses"), *_miscounted(connection, rewards, "rewards"),
            *_gone(connection),
        ]  # fmt: skip
        if checkpoint is not None:
            complaint = _lacking(connection, checkpoint)
            found.complaints += [complaint] if complaint else _unbalanced(connection, checkpoint)
        for sequences, checksum, superseded, seal, tokens, *sealed in _all(connection, _ROLLOUTS):
            found.rollouts += 1
            found.unsigned += seal is None
            complaints = _tokens(bytes(sequences), sealed[3], checksum, tokens), _fields(sealed, superseded, seal)
            found.complaints += [f"rollout {sealed[0]}: {complaint}" for complaint in complaints if complaint]
        found.complaints += [*_rewards(connection), *_uses(connection)]
    return found


def _all(connection: Connection, query: Any) -> Iterator[Any]:
    yield from connection.execution_options(yield_per=READ_TOGETHER).execute(query)


def refuse_other(store: Ledger, checkpoint: Needs) -> None:
    """Refuse a store that lacks rows which a checkpoint depends on."""
    with store.transaction() as connection:
        if complaint := _lacking(connection, checkpoint):
            raise SoleraError(f"{store.place}: {complaint}")


def _lacking(connection: Connection, needs: Needs) -> str | None:
    last = connection.scalar(select(func.max(_r.id))) or 0
    written = f"the checkpoint of step {needs.version} expects"
    if last < needs.watermark:
        return f"{written} {needs.watermark} rollouts, but the store has {last}: restore the run's own store"
    found = count_uses(connection, needs.version)
    if needs.uses is None or needs.uses == found:
        return None
    other = "as many, of other rollouts" if found[0] == needs.uses[0] else str(found[0])
    return (
        f"{written} {needs.uses[0]} uses of rollouts, but the store has {other}: another resume went back "
        "further, or the store is an older copy; restore the store that belongs to this checkpoint, or "
        "resume from an earlier one (--from STEP)"
    )


def _unbalanced(connection: Connection, needs: Needs) -> Iterator[str]:
    """Where the checkpoint's account of tokens does not balance, or differs from the store, which is summed anew."""
    account, where = needs.account, f"the account of tokens in the checkpoint of step {needs.version}"
    if account is None:
        return
    if account.difference:
        yield f"{where} does not balance: {account.told()}"
    trained, masked, _ = first_uses(connection, 0, needs.version)
    superseded = stored(connection, 0, needs.watermark, superseded=True)
    undrawn = stored(connection, 0, needs.watermark) - trained - masked - superseded
    dropped = account.dropped.get
    for name, said, found in (
        ("trained on", account.trained, trained), ("masked", dropped(MASKED, 0), masked),
        ("superseded", dropped(SUPERSEDED, 0), superseded),
        ("not drawn", account.waiting + dropped(LEFTOVER, 0) + dropped(TOO_OLD, 0), undrawn),
    ):  # fmt: skip
        if said != found:
            yield f"{where} has {said} tokens {name}, the store has {found} ({found - said:+})"


def _integrity(connection: Connection) -> Iterator[str]:
    """Faults that SQLite finds in its own file. PostgreSQL checks its pages when it reads them."""
    if connection.dialect.name == "sqlite":
        lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars()
        yield from (f"the file: {' '.join(str(line).split())}" for line in lines if line != "ok")


def _orphans(connection: Connection) -> Iterator[str]:
    for table in (rewards, uses):
        owner = table.c.rollout_id
        lost = connection.scalars(select(owner).distinct().where(~exists().where(_r.id == owner)).order_by(owner))
        yield from (f"{table.name}: rows belong to rollout {id_}, which does not exist" for id_ in lost)


def _miscounted(connection: Connection, table: Table, noun: str) -> Iterator[str]:
    """Rollouts whose recorded number of these rows differs from the actual one. An earlier version did not count
    rewards."""
    there = select(table.c.rollout_id, func.count().label("rows")).group_by(table.c.rollout_id).subquery()
    count, held = func.coalesce(there.c.rows, 0), rollouts.c[noun]
    query = select(_r.id, held, count).join_from(rollouts, there, there.c.rollout_id == _r.id, isouter=True)
    for id_, said, found in connection.execute(query.where(held != count).order_by(_r.id)):
        yield f"rollout {id_}: it had {said} {noun}, but the store has {found}"


def _gone(connection: Connection) -> Iterator[str]:
    """Missing ids. Ids have no gaps. Rollouts removed from the end, with all their rows, cannot be detected."""
    for before, after in pairwise(chain([0], connection.scalars(select(_r.id).order_by(_r.id)))):
        if after - before == 2:
            yield f"rollout {before + 1} is missing"
        elif after - before > 2:
            yield f"rollouts {before + 1} to {after - 1} are missing"


def _tokens(sequences: bytes, version: int | None, checksum: int | None, tokens: int | None) -> str | None:
    if checksum is not None and crc32(sequences) != checksum:
        return "its tokens are damaged: the checksum differs"
    try:
        held = Rollout("", decode(sequences))
    except SoleraError as error:
        return str(error)
    if held.version != version:
        return f"its tokens are of version {held.version}, its row says {version}"
    return None if tokens in (None, held.length) else f"it has {held.length} tokens, its row says {tokens}"


def _fields(sealed: list[Any], superseded: int, seal: int | None) -> str | None:
    if seal is None or seal_of(*sealed) + SET_ASIDE * superseded == seal:
        return None
    return f"its key, text, origin, lineage, version, finish reason, sampling, admission or time is {_DIFFERS}"


def _rewards(connection: Connection) -> Iterator[str]:
    for checksum, *values in _all(connection, _REWARDS):
        if checksum is not None and checksum_of_reward(*values) != checksum:
            id_, part, revision, *_ = values
            yield f"rollout {id_}: revision {revision} of its reward {part!r} is {_DIFFERS}"


def _uses(connection: Connection) -> Iterator[str]:
    for checksum, *values in _all(connection, _USES):
        if checksum is not None and checksum_of_use(*values) != checksum:
            version, id_, *_ = values
            yield f"rollout {id_}: its use at version {version} (age, advantage, revision, group) is {_DIFFERS}"
