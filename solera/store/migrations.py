"""Upgrade stores that an earlier version of Solera wrote."""

from sqlalchemy import Column, Connection, Integer, MetaData, Table, insert, inspect, select, update

from solera.errors import SoleraError
from solera.store.schema import metadata

MIGRATIONS = {
    2: (
        "ALTER TABLE rollouts ADD COLUMN fingerprint {bytes}",
        "CREATE UNIQUE INDEX rollouts_imported ON rollouts (fingerprint) WHERE fingerprint IS NOT NULL",
        "ALTER TABLE rewards ADD COLUMN late INTEGER",
        "CREATE INDEX rewards_late ON rewards (late) WHERE late IS NOT NULL",
    ),
    3: (
        "DROP INDEX rollouts_to_draw",
        "CREATE INDEX rollouts_to_draw ON rollouts (id, prompt_key) "
        "WHERE uses = 0 AND superseded = 0 AND origin != 'probe'",
    ),
    4: (
        "ALTER TABLE rollouts ADD COLUMN text VARCHAR",
        "ALTER TABLE rollouts ADD COLUMN checksum BIGINT",
        "ALTER TABLE rewards ADD COLUMN position INTEGER",
        "ALTER TABLE uses ADD COLUMN revision INTEGER",
    ),
    5: (
        "ALTER TABLE rollouts ADD COLUMN admission INTEGER",
        "ALTER TABLE rollouts ADD COLUMN rewards INTEGER",
        "ALTER TABLE rollouts ADD COLUMN seal BIGINT",
        "DROP INDEX rollouts_to_draw",
        "CREATE INDEX rollouts_to_draw ON rollouts (id, prompt_key, admission) "
        "WHERE uses = 0 AND superseded = 0 AND origin != 'probe'",
        "ALTER TABLE rewards ADD COLUMN checksum BIGINT",
        "ALTER TABLE uses ADD COLUMN group_number INTEGER",
        "ALTER TABLE uses ADD COLUMN checksum BIGINT",
    ),
    6: ("ALTER TABLE rollouts ADD COLUMN tokens INTEGER",),
    7: ("ALTER TABLE rewards ADD COLUMN sequence INTEGER",),
}
"""The statements that lead to each version from the one before. Never change an entry: add the next."""
VERSION = max(MIGRATIONS)
UNMARKED = 1
"""Version of a store without a version number: the first schema did not store it."""

_bytes = {"sqlite": "BLOB", "postgresql": "BYTEA"}
_version = Table("schema_version", MetaData(), Column("version", Integer, nullable=False))


def version_of(connection: Connection) -> int:
    """Version of the store's schema; 0 if there is no store yet."""
    tables = set(inspect(connection).get_table_names())
    if _version.name in tables:
        return connection.scalars(select(_version.c.version)).one()
    return UNMARKED if "rollouts" in tables else 0


def migrate(connection: Connection, place: str) -> None:
    """Upgrade a store to this version, or create it, in the open transaction."""
    held = version_of(connection)
    refuse_newer(held, place)
    if held == VERSION:
        return
    if held == 0:
        metadata.create_all(connection)
    for number in range(held + 1, VERSION + 1) if held else ():
        for statement in MIGRATIONS[number]:
            connection.exec_driver_sql(statement.format(bytes=_bytes[connection.dialect.name]))
    _version.create(connection, checkfirst=True)
    marked = connection.scalar(select(_version.c.version)) is not None
    connection.execute((update(_version) if marked else insert(_version)).values(version=VERSION))


def refuse_newer(held: int, place: str) -> None:
    if held > VERSION:
        raise SoleraError(
            f"{place}: the store has schema version {held}, but this Solera supports only up to {VERSION}: "
            "install a newer Solera"
        )
