"""Stores of other versions and in other places: brought up to date, kept apart, or refused in one line."""

import re
import shutil
import sqlite3
import time
import uuid
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import inspect

from solera.config import parse
from solera.errors import SoleraError
from solera.report.groups import sample_groups
from solera.report.run_folder import read_run
from solera.report.sinks import read_metrics
from solera.running import resume, train
from solera.store.database import open_for_reading, place_in, place_of
from solera.store.ledger import Ledger, open_store
from solera.store.migrations import VERSION
from tests.store.test_ledger import drawn, rollouts

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


def described(place) -> dict[str, object]:
    """Tables with their columns and indices, as the database itself tells them."""
    with open_for_reading(place) as connection:
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


def test_a_newer_store_is_refused_in_one_line(store_of_the_future):
    says = f"the store has schema 999, this Solera knows up to {VERSION}: use a newer one"
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
    with pytest.raises(SoleraError, match=r"exists already: choose another --run\.name, or drop that schema"):
        train(parse(again, "test"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_server_that_is_away_is_said_in_one_line(tmp_path):
    pytest.importorskip("psycopg")
    with pytest.raises(OSError, match="cannot be used as a store: connection failed") as refusal:
        Ledger(place_of("postgresql://nobody@127.0.0.1:1/none", tmp_path))
    assert "\n" not in str(refusal.value)


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
    said = f"its rollouts are in the schema '{folder.name}', by run.name in its config.toml: call the folder"
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
