"""The location of a store and connections to it: a SQLite file, or a schema of a PostgreSQL database."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import ArgumentError, DatabaseError, IntegrityError, OperationalError

from solera.config import load
from solera.config.secrets import NO_PASSWORD, NO_URL, holds_password
from solera.errors import SoleraError, one_line
from solera.folder.paths import CONFIG, STORE
from solera.store.migrations import VERSION, migrate, refuse_newer, version_of


@dataclass(frozen=True)
class Postgres:
    """A run's store in a PostgreSQL database. Its tables are in a schema with the run's name."""

    url: URL
    run: str

    def __str__(self) -> str:
        """Without the options of the URL, which may contain secrets."""
        return f"{self.url.set(query={}).render_as_string(hide_password=True)} schema {self.run!r}"


Place = Path | Postgres
BUSY_SECONDS = 30
"""How long to wait for another process that writes to the same SQLite file."""


def place_of(url: str | None, folder: Path, name: str | None = None) -> Place:
    """The store of the run in `folder`, whose config has `store.url` and `run.name`.

    A renamed folder is refused. Its schema keeps the old name, and two runs that share a schema would undo each other's
    steps.
    """
    if url is None:
        return folder / STORE
    if name not in (None, folder.absolute().name):
        raise SoleraError(
            f"{folder}: its rollouts are in the schema {name!r} (run.name in its config.toml): rename the "
            f"folder back to {name}"
        )
    if holds_password(url):
        raise SoleraError(NO_PASSWORD)
    try:
        return Postgres(make_url(url).set(drivername="postgresql+psycopg"), folder.absolute().name)
    except (ArgumentError, ValueError):
        raise SoleraError(NO_URL) from None  # their messages repeat parts of the URL


def place_in(folder: Path) -> Place:
    """The store of an existing run."""
    if not (folder / CONFIG).is_file():
        raise SoleraError(f"{folder}: no config.toml, so it is not the folder of a run")
    config = load(folder / CONFIG)
    place = place_of(config.store.url, folder, config.run.name)
    if not (place.is_file() if isinstance(place, Path) else _has_schema(place)):
        raise SoleraError(f"{place}: no such store")
    return place


def refuse_taken(place: Place) -> None:
    """Refuse a place that already has a store. A new run needs its own."""
    if isinstance(place, Postgres) and _has_schema(place):
        raise SoleraError(f"{place} already exists: choose another --run.name, or drop that schema")


def _has_schema(place: Postgres) -> bool:
    engine = _postgres(place)
    try:
        with transaction_of(engine, place) as connection:
            return inspect(connection).has_schema(place.run)
    finally:
        engine.dispose()


def open_engine(place: Place) -> Engine:
    """An engine for reading and writing. Creates the schema, or upgrades it to this version."""
    engine = _postgres(place) if isinstance(place, Postgres) else _sqlite(place)
    with transaction_of(engine, place) as connection:
        if isinstance(place, Postgres):
            connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {_quoted(place.run)}")
        migrate(connection, str(place))
    return engine


@contextmanager
def open_for_reading(place: Place) -> Iterator[Connection]:
    """A consistent snapshot of a store. It does not block writers and does not show their later changes.

    A store from an earlier version of Solera is upgraded first, which needs write access.
    """
    if 0 < _version_of(place) < VERSION:
        open_engine(place).dispose()
    with _reader(place) as connection:
        refuse_newer(version_of(connection), str(place))
        yield connection


def _version_of(place: Place) -> int:
    with _reader(place) as connection:
        return version_of(connection)


@contextmanager
def _reader(place: Place) -> Iterator[Connection]:
    engine = _postgres(place, "REPEATABLE READ") if isinstance(place, Postgres) else _sqlite_read_only(place)
    try:
        with complaining(place, "cannot be read as a store"), engine.connect() as connection:
            if isinstance(place, Path):
                connection.exec_driver_sql("BEGIN")
            yield connection
    finally:
        engine.dispose()


@contextmanager
def transaction_of(engine: Engine, place: Place) -> Iterator[Connection]:
    """One write transaction on its own connection."""
    with complaining(place, "cannot be used as a store"), engine.connect() as connection:
        connection.info["write"] = True
        with connection.begin():
            yield connection


@contextmanager
def transaction(connection: Connection, place: Place, write: bool = False) -> Iterator[None]:
    """Run statements in one transaction, so that either all or none of them take effect."""
    connection.info["write"] = write
    with complaining(place, "the store cannot be used"), connection.begin():
        yield


@contextmanager
def complaining(place: Place, complaint: str) -> Iterator[None]:
    """Report a full disk, a damaged file or an unreachable server in one line."""
    try:
        yield
    except IntegrityError:
        raise
    except DatabaseError as error:
        said = f"{complaint}: {_locked(error) or one_line(error.orig or error)}"
        if isinstance(error, OperationalError) and not _of_another_make(error):
            raise OSError(errno.EIO, said, str(place)) from error
        raise SoleraError(f"{place}: {said}") from error


def _locked(error: DatabaseError) -> str | None:
    if getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
        return None
    return f"another process has been writing to it for {BUSY_SECONDS} s; try again when it is done"


def _of_another_make(error: OperationalError) -> bool:
    """Whether a table is missing, because another version or program wrote the file. SQLite raises the same class for
    a full disk."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _sqlite(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes the lock first, so that what it reads before writing stays valid."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.info.get("write") else "BEGIN")


def _prepare_sqlite(connection: Any, _: object) -> None:
    """Use the write-ahead log: a killed process loses nothing that was reported as written, and readers do not block
    the writer.

    The page size is larger than SQLite's default, in which only two rollouts of two hundred tokens fit and a quarter
    stays empty.
    """
    connection.isolation_level = None  # we begin transactions, not the driver
    patience = f"busy_timeout={1000 * BUSY_SECONDS:.0f}"  # first, because the next statements may already have to wait
    for pragma in (patience, "page_size=8192", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _sqlite_read_only(path: Path) -> Engine:
    if not path.is_file():
        raise SoleraError(f"{path}: no such store")
    # A store that was closed cleanly has no write-ahead log. Unless told so, SQLite would create the log's files
    # and, with read access only, leave them there.
    mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    uri = f"{path.absolute().as_uri()}?{mode}"
    return create_engine("sqlite://", creator=lambda: sqlite3.connect(uri, BUSY_SECONDS, uri=True))


def _postgres(place: Postgres, isolation: IsolationLevel = "READ COMMITTED") -> Engine:
    try:
        engine = create_engine(place.url, paramstyle="format", isolation_level=isolation)
    except ModuleNotFoundError as error:
        raise SoleraError("store.url: PostgreSQL needs the package psycopg: pip install 'solera[postgres]'") from error

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.autocommit = True  # otherwise the first rollback would undo the setting
        connection.execute(f"SET search_path TO {_quoted(place.run)}")
        connection.autocommit = False

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        """Writers of one store wait for each other, as with SQLite: ids grow in the order of commits."""
        if connection.info.get("write"):
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"solera {place.run}",))

    return engine


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
