"""Whether a store is whole (the file, orphans, the bytes of each rollout), and whether it fits a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from sqlalchemy import Connection, exists, func, select

from solera.errors import SoleraError
from solera.records import Rollout
from solera.store.database import Place, open_for_reading
from solera.store.encoding import decode
from solera.store.ledger import Ledger, count_uses
from solera.store.schema import rewards, rollouts, uses

_r, _w, _u = rollouts.c, rewards.c, uses.c
_recorded = select(_u.rollout_id, func.count().label("uses")).group_by(_u.rollout_id).subquery()
_COUNTED = func.coalesce(_recorded.c.uses, 0)
_MISCOUNTED = (
    select(_r.id, _r.uses, _COUNTED)
    .join_from(rollouts, _recorded, _recorded.c.rollout_id == _r.id, isouter=True)
    .where(_r.uses != _COUNTED)
    .order_by(_r.id)
)
_ROWS = select(_r.id, _r.version, _r.sequences, _r.checksum).order_by(_r.id)
READ_TOGETHER = 1_000


@dataclass
class Verified:
    """How much was looked at, and what is wrong with it."""

    rollouts: int = 0
    unsigned: int = 0
    """Rollouts of a Solera that wrote no checksums."""
    complaints: list[str] = field(default_factory=list)


class Needs(NamedTuple):
    """What a store held when the checkpoint of `version` was written: the id of the last rollout, and
    `uses_before(version)`, which older checkpoints do not tell."""

    version: int
    watermark: int
    uses: tuple[int, int] | None


def verify(place: Place, checkpoint: Needs | None = None) -> Verified:
    """Read all of a store, and compare it with the run's newest checkpoint."""
    found = Verified()
    with open_for_reading(place) as connection:
        found.complaints += [*_integrity(connection), *_orphans(connection), *_miscounted(connection)]
        if checkpoint is not None and (complaint := _lacking(connection, checkpoint)):
            found.complaints.append(complaint)
        for id_, version, sequences, checksum in connection.execution_options(yield_per=READ_TOGETHER).execute(_ROWS):
            found.rollouts += 1
            found.unsigned += checksum is None
            if complaint := _damage(bytes(sequences), version, checksum):
                found.complaints.append(f"rollout {id_}: {complaint}")
    return found


def refuse_other(store: Ledger, checkpoint: Needs) -> None:
    """Refuse a store that lacks rows which a checkpoint depends on."""
    with store.transaction() as connection:
        if complaint := _lacking(connection, checkpoint):
            raise SoleraError(f"{store.place}: {complaint}")


def _lacking(connection: Connection, needs: Needs) -> str | None:
    last = connection.scalar(select(func.max(_r.id))) or 0
    written = f"the checkpoint of step {needs.version} was written with"
    if last < needs.watermark:
        return f"{written} {needs.watermark} rollouts in it, but it holds {last}: put the run's own store back"
    found = count_uses(connection, needs.version)
    if needs.uses is None or needs.uses == found:
        return None
    other = "as many of other ones" if found[0] == needs.uses[0] else str(found[0])
    return (
        f"{written} {needs.uses[0]} uses of rollouts in it, but it holds {other}: another resume went back further, or "
        "it is an older copy: put the store back that belongs to this checkpoint, or go on from an earlier one "
        "(--from STEP)"
    )


def _integrity(connection: Connection) -> Iterator[str]:
    """What SQLite finds in its own file; PostgreSQL checks its pages as it reads them."""
    if connection.dialect.name == "sqlite":
        lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars()
        yield from (f"the file: {' '.join(str(line).split())}" for line in lines if line != "ok")


def _orphans(connection: Connection) -> Iterator[str]:
    for table in (rewards, uses):
        owner = table.c.rollout_id
        lost = connection.scalars(select(owner).distinct().where(~exists().where(_r.id == owner)).order_by(owner))
        yield from (f"{table.name}: there is no rollout {id_} that they belong to" for id_ in lost)


def _miscounted(connection: Connection) -> Iterator[str]:
    for id_, held, counted in connection.execute(_MISCOUNTED):
        yield f"rollout {id_}: says it was used {held} times, but {counted} uses are recorded"


def _damage(sequences: bytes, version: int | None, checksum: int | None) -> str | None:
    if checksum is not None and crc32(sequences) != checksum:
        return "its tokens are not those that were written: the checksum differs"
    try:
        held = Rollout("", decode(sequences)).version
    except SoleraError as error:
        return str(error)
    return None if held == version else f"its tokens are of version {held}, its row says {version}"
