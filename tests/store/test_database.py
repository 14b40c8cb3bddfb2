"""Stores of other versions and in other places: brought up to date, kept apart, or refused in one line."""

import json
import re
import shutil
import sqlite3
import time
import traceback
import uuid
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from solera.config import Config, check, fields_of, parse
from solera.errors import SoleraError
from solera.records import Reward
from solera.report.groups import sample_groups
from solera.report.html import write_report
from solera.report.run_folder import read_run
from solera.report.sinks import read_metrics
from solera.run.running import resume, train
from solera.store.database import Postgres, open_for_reading, place_in, place_of
from solera.store.ledger import Ledger, open_store
from solera.store.migrations import VERSION
from solera.store.reading import reading
from solera.store.verifying import verify
from tests.store.test_ledger import drawn, learn, rollouts, visit

FIRST = """
CREATE TABLE rollouts (
    id INTEGER NOT NULL, prompt_key VARCHAR NOT NULL, lineage VARCHAR, version INTEGER, origin VARCHAR NOT NULL,
    finish_reason VARCHAR NOT NULL, temperature FLOAT, max_tokens INTEGER, top_p FLOAT, created FLOAT NOT NULL,
    sequences {bytes} NOT NULL, superseded INTEGER DEFAULT '0' NOT NULL, uses INTEGER DEFAULT '0' NOT NULL,
    PRIMARY KEY (id));
CREATE INDEX rollouts_to_draw ON rollouts (id, prompt_key) WHERE uses = 0 AND superseded = 0;
CREATE TABLE rewards (
    rollout_id INTEGER NOT NULL, part VARCHAR NOT NULL, revision INTEGER NOT NULL, value FLOAT NOT NULL,
    source VARCHAR NOT NULL, created FLOAT NOT NULL, PRIMARY KEY (rollout_id, part, revision),
    FOREIGN KEY(rollout_id) REFERENCES rollouts (id));
CREATE TABLE uses (
    version INTEGER NOT NULL, rollout_id INTEGER NOT NULL, age INTEGER, advantage FLOAT,
    PRIMARY KEY (version, rollout_id), FOREIGN KEY(rollout_id) REFERENCES rollouts (id));
INSERT INTO rollouts VALUES (1, 'a', NULL, 0, 'self', 'stop', NULL, NULL, NULL, 0, {empty}, 0, 0);
INSERT INTO rewards VALUES (1, 'reward', 0, 0.5, 'task', 0);
"""
"""A store as the first version made it, with one rollout of no sequences."""


def write_first(place) -> None:
    if isinstance(place, Path):
        with sqlite3.connect(place) as database:
            database.executescript(FIRST.format(bytes="BLOB", empty="x'010000'"))
        return
    import psycopg

    with psycopg.connect(place.url.set(drivername="postgresql").render_as_string()) as database:
        database.execute(f'CREATE SCHEMA "{place.run}"; SET search_path TO "{place.run}";')
        database.execute(FIRST.format(bytes="BYTEA", empty="'\\x010000'"))


def write_fourth(place) -> None:
    """Rollouts of a run (1 to 4, the first two used) and of people (5 to 7), with late and revised rewards."""
    template = (Path(__file__).parent / "schema_4.sql").read_text(encoding="utf-8")
    if isinstance(place, Path):
        with sqlite3.connect(place) as database:
            database.executescript(template.format(bytes="BLOB", blob="X'", without_rowid=" WITHOUT ROWID"))
        return
    import psycopg

    with psycopg.connect(place.url.set(drivername="postgresql").render_as_string()) as database:
        database.execute(f'CREATE SCHEMA "{place.run}"; SET search_path TO "{place.run}";')
        database.execute(template.format(bytes="BYTEA", blob="'\\x", without_rowid=""))


def described(place) -> dict[str, object]:
    """Tables with their columns and indices, as the database itself tells them."""
    engine = create_engine(place.url if isinstance(place, Postgres) else f"sqlite:///{place}")
    with closing(engine.connect()) as connection:
        if isinstance(place, Postgres):
            connection.exec_driver_sql(f'SET search_path TO "{place.run}"')
        tables = inspect(connection)
        return {
            name: (
                sorted(
                    (column["name"], str(column["type"]), column["nullable"]) for column in tables.get_columns(name)
                ),
                sorted((index["name"], index["column_names"], index["unique"]) for index in tables.get_indexes(name)),
            )
            for name in tables.get_table_names()
        }


def test_a_store_of_the_first_version_becomes_one_of_this(place, tmp_path):
    write_first(place)
    store = Ledger(place)
    store.add(rollouts("a"))
    assert drawn(store, 1, 2) == [("a", [1, 2])]
    store.close()
    new = tmp_path / "new.db" if isinstance(place, Path) else place_of(str(place.url), tmp_path / f"{place.run}-new")
    Ledger(new).close()
    assert described(place) == described(new)
    Ledger(place).close()  # nothing left to do


def test_a_store_of_the_fourth_version_is_brought_to_this_and_works(place, tmp_path):
    write_fourth(place)
    store = Ledger(place)
    new = tmp_path / "new.db" if isinstance(place, Path) else place_of(str(place.url), tmp_path / f"{place.run}-new")
    Ledger(new).close()
    assert described(place) == described(new)
    assert drawn(store, 9, 2) == [("b", [3, 4]), ("c", [5, 6])]  # of no known visit: as before
    assert drawn(store, 9, 3) == [("b", [3, 4, 7])]
    assert [rollout.reward for rollout in store.draw(1, 3)[0].rollouts] == [0.75, 0.5, 1.0]
    ids = store.add([*visit(0, "b", "1-"), *visit(1, "b", "01")])
    assert drawn(store, 9, 2) == [("b", [3, 4]), ("c", [5, 6]), ("b", ids[2:])]
    store.revise([(1, Reward(0.25)), (ids[0], Reward(0.5))])
    assert learn(store, 9, 2, 4) == [[3, 4], [5, 6], ids[2:]]
    assert store.passed_over() == {"leftover": 1}
    store.close()
    found = verify(place)
    assert (found.rollouts, found.unsigned, found.complaints) == (11, 7, [])
    with reading(place) as opened:
        assert [[r.id for r in used.group.rollouts] for used in opened.used(3, 2)] == [[1, 2]]
        assert [used.guessed for used in (*opened.used(3, 2), *opened.used(4, 2))] == [True, False, False, False]


def test_a_store_of_the_fourth_version_can_be_read_at_once(place):
    """By the commands that only read: a report, an export, statistics."""
    write_fourth(place)
    with reading(place) as opened:
        assert [rollout.id for rollout, _ in opened.rollouts()] == [1, 2, 3, 4, 5, 6, 7]
        assert len(opened.used(3, 2)) == 1
    assert verify(place).complaints == []


def test_a_newer_store_is_refused_in_one_line(store_of_the_future):
    says = f"the store has schema version 999, but this Solera supports only up to {VERSION}: install a newer Solera"
    with pytest.raises(SoleraError, match=says):
        Ledger(store_of_the_future)
    with pytest.raises(SoleraError, match=says), open_for_reading(store_of_the_future):
        pass


@pytest.fixture
def store_of_the_future(place):
    store = Ledger(place)
    with store.transaction(write=True) as connection:
        connection.exec_driver_sql("UPDATE schema_version SET version = 999")
    store.close()
    return place


def test_a_migration_that_fails_changes_nothing(tmp_path):
    place = tmp_path / "store.db"
    write_first(place)
    with sqlite3.connect(place) as database:
        database.execute("CREATE INDEX rewards_late ON rewards (created)")  # in the way of the migration's last step
    with pytest.raises(SoleraError, match=r"store\.db: cannot be used as a store: index rewards_late already exists"):
        Ledger(place)
    assert "fingerprint" not in str(described(place))
    assert "schema_version" not in described(place)


RUN = """
run = {{ root = "{root}", name = "{name}", steps = 4, device = "cpu" }}
collect = {{ prompts = 4, group_size = 4 }}
store = {{ {store} }}
evaluate = {{ every = 0, problems = 4 }}
report = {{ tensorboard = false, progress = false }}
"""


def test_a_run_is_the_same_in_both_databases(tmp_path, postgres):
    rows = []
    for number, store in enumerate(("", f'url = "{postgres}"')):
        folder = train(parse(RUN.format(root=tmp_path, name=f"{tmp_path.name}-{number}", store=store), "test")).folder
        told = read_metrics(folder / "metrics.jsonl")
        rows.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in told])
    assert rows[0] == rows[1]
    assert not (folder / "store.db").exists()
    assert '"members"' in (folder / "report.html").read_text()
    again = RUN.format(root=tmp_path / "elsewhere", name=folder.name, store=f'url = "{postgres}"')
    with pytest.raises(SoleraError, match=r"already exists: choose another --run\.name, or drop that schema"):
        train(parse(again, "test"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_server_that_is_away_is_said_in_one_line(tmp_path):
    pytest.importorskip("psycopg")
    with pytest.raises(OSError, match="cannot be used as a store: connection failed") as refusal:
        Ledger(place_of("postgresql://nobody@127.0.0.1:1/none", tmp_path))
    assert "\n" not in str(refusal.value)


SECRETS = [
    "postgresql://me:s3cr/t@127.0.0.1:1/db", "postgresql+psycopg://me:s3cr@t@127.0.0.1:1/db",
    "postgresql://me:s3cr#t@127.0.0.1:1/db", "postgresql://me:s3cr?t@127.0.0.1:1/db",
    "postgresql://me:s3cr%2Ft@127.0.0.1:1/db", "postgresql://me:s3cr:t@127.0.0.1:1/db",
    "postgresql://:s3cr@127.0.0.1:1/db", "postgresql://me%3As3cr@127.0.0.1:1/db",
    "postgresql://me/x:s3cr@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db?user=me&password=s3cr",
    "postgresql://127.0.0.1:1/db?PASSWORD=s3cr", "postgresql://127.0.0.1:1/db?pass%77ord=s3cr",
    "postgresql://me@127.0.0.1:1/db?sslpassword=s3cr", "postgresql://me@127.0.0.1:1/db#password=s3cr",
    "postgresql://me:s3cr/db", "postgres://me:s3cr@127.0.0.1:1/db", "host=127.0.0.1 password=s3cr",
    "postgresql://[me:s3cr@127.0.0.1:1/db", "postgresql://me@127.0.0.1:1/db?passwd=s3cr", "me:s3cr@127.0.0.1:1/db",
]  # fmt: skip


@pytest.mark.parametrize("url", SECRETS)
def test_a_password_in_the_url_is_refused_and_repeated_nowhere(tmp_path, url):
    pytest.importorskip("psycopg")
    run = parse(RUN.format(root=tmp_path / "runs", name="mine", store=f'url = "{url}"'), "test")
    with pytest.raises((SoleraError, OSError)) as refusal:
        train(run)
    assert "s3cr" not in "".join(traceback.format_exception(refusal.value))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me@db.example/passwords", "postgresql+psycopg://me@[::1]:5432/db", "postgresql:///db?host=/run/pg",
        "postgresql://me%40tenant@db.example:5432/db?sslmode=require", "postgresql://db.example",
    ],
)  # fmt: skip
def test_a_url_without_a_password_is_taken(url):
    check(parse(f'store.url = "{url}"', "test"))


def test_a_password_in_an_older_run_does_not_reach_the_page(tmp_path):
    """Solera once took these for harmless, and wrote them to both files."""
    url = "postgresql://me:s3cr/t@127.0.0.1:1/db"
    settings = {name: value for name, value in fields_of(Config()).items() if name != "store.url"}
    begun = {"started_in": "", "problems": "", "rows": {}, "settings": settings | {"store.url": f'"{url}"'}}
    for number, held in enumerate((url, "postgresql://me:s3cret/2@127.0.0.1:1/db")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.toml").write_text(f'[run]\nname = "{number}"\n[store]\nurl = "{held}"\n')
        (folder / "beginning.json").write_text(json.dumps(begun))
        (folder / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 1.0}\n')
        page = write_report([folder], folder / "report.html").read_text()
        assert "s3cr" not in page and "store.url holds a password" in page
        assert ("store.url has another value" in page) == (number == 1)  # edited since it began
        said = [say(folder) for say in (told_by_resume, told_by_data)]
        assert not any("s3cr" in sentence for sentence in said)
        assert all("store.url holds a password" in sentence for sentence in said)


def told_by_resume(folder: Path) -> str:
    with pytest.raises((SoleraError, OSError)) as refusal:
        resume(folder)
    return str(refusal.value)


def told_by_data(folder: Path) -> str:
    with pytest.raises((SoleraError, OSError)) as refusal:
        open_store(folder)
    return str(refusal.value)


def test_a_password_of_the_environment_is_used_and_written_nowhere(tmp_path, postgres, monkeypatch):
    """Neither in the run's folder nor in what the driver says of a database that does not exist."""
    monkeypatch.setenv("PGPASSWORD", "s3cr/t")
    config = parse(RUN.format(root=tmp_path, name=f"{tmp_path.name}-env", store=f'url = "{postgres}"'), "test")
    folder = train(config).folder
    assert not any(b"s3cr" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    absent = place_of(postgres.replace("/postgres", "/absent"), tmp_path)
    with pytest.raises(OSError, match="absent") as refusal:
        Ledger(absent)
    assert "s3cr" not in "".join(traceback.format_exception(refusal.value))


@pytest.mark.parametrize("begun", [True, False])
def test_another_process_that_writes_for_too_long_is_told(tmp_path, monkeypatch, begun):
    """SQLite's own words for it are "database is locked"."""
    monkeypatch.setattr("solera.store.database.BUSY_SECONDS", 0.25)
    place = tmp_path / "store.db"
    store = Ledger(place)
    with closing(sqlite3.connect(place, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        start = time.perf_counter()
        with pytest.raises(
            OSError, match=r"another process has been writing to it for 0\.25 s; try again when it is done"
        ):
            store.add(rollouts("a")) if begun else Ledger(place)
        assert 0.2 < time.perf_counter() - start < 4
        other.execute("COMMIT")
    assert store.add(rollouts("a")) == [1]
    store.close()


def test_a_folder_of_another_name_is_not_given_a_schema_of_its_own(tmp_path, postgres):
    run = parse(RUN.format(root=tmp_path, name=f"moved-{uuid.uuid4().hex[:8]}", store=f'url = "{postgres}"'), "test")
    folder = train(run).folder
    other = folder.rename(tmp_path / f"{folder.name}-elsewhere")
    shutil.rmtree(other / "model")
    said = f"its rollouts are in the schema '{folder.name}' (run.name in its config.toml): rename the folder back to"
    for use in (partial(open_store, other), partial(resume, other), partial(place_in, other)):
        with pytest.raises(SoleraError, match=re.escape(said)):
            use()
    told = read_run(other)
    assert sample_groups(told, 3) == [] and said in told.notes[-1]
    import psycopg

    with psycopg.connect(postgres.replace("+psycopg", "")) as database:
        names = {name for (name,) in database.execute("SELECT schema_name FROM information_schema.schemata")}
    assert folder.name in names and other.name not in names
    assert not isinstance(place_in(other.rename(folder)), Path)


def test_a_schema_that_was_dropped_is_not_made_again_by_an_import(tmp_path, postgres):
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "config.toml").write_text(f'[run]\nname = "gone"\n[store]\nurl = "{postgres}"\n')
    with pytest.raises(SoleraError, match=r"schema .gone.*: no such store"):
        open_store(tmp_path / "gone")
