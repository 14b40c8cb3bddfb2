"""Damage that is done to a store behind its back is found and named."""

import dataclasses
import re
import sqlite3
from math import isnan

import pytest

from solera.errors import SoleraError
from solera.records import Reward, Sampling, Use
from solera.store.deferred import Deferred
from solera.store.ledger import Ledger
from solera.store.verifying import verify
from tests.store.test_ledger import rollouts, use

ANOTHER = (
    "rollout {}: its key, text, origin, lineage, version, finish reason, sampling, admission or time is damaged: "
    "the checksum"
)
DAMAGE = {
    "update rollouts set prompt_key = 'b' where id = 2": ANOTHER.format(2),
    "update rollouts set text = 'as it is' where id = 4": ANOTHER.format(4),
    "update rollouts set text = null where id = 4": ANOTHER.format(4),
    "update rollouts set text = '' where id = 2": ANOTHER.format(2),
    "update rollouts set origin = 'model:other' where id = 4": ANOTHER.format(4),
    "update rollouts set lineage = 'another' where id = 2": ANOTHER.format(2),
    "update rollouts set finish_reason = 'length' where id = 3": ANOTHER.format(3),
    "update rollouts set temperature = 0.7000000000000001 where id = 1": ANOTHER.format(1),
    "update rollouts set max_tokens = 8 where id = 1": ANOTHER.format(1),
    "update rollouts set top_p = null where id = 1": ANOTHER.format(1),
    "update rollouts set created = created + 1 where id = 2": ANOTHER.format(2),
    "update rollouts set admission = 6 where id = 1": ANOTHER.format(1),
    "update rollouts set admission = 6 where id = 2": ANOTHER.format(2),
    "update rollouts set fingerprint = null where id = 4": ANOTHER.format(4),
    "update rollouts set superseded = 1 where id = 1": ANOTHER.format(1),
    "update rollouts set superseded = 0 where id = 6": ANOTHER.format(6),
    "update rollouts set uses = 5 where id = 3": "rollout 3: it had 5 uses, but the store has 1",
    "update rewards set value = 1.0000001 where rollout_id = 2": "rollout 2: revision 0 of its reward 'reward' is dam",
    "update rewards set value = 1 where rollout_id = 1 and revision = 1": "rollout 1: revision 1 of its reward",
    "update rewards set source = 'bob' where revision = 1": "rollout 1: revision 1 of its reward 'reward' is dam",
    "update rewards set position = 2 where revision = 1": "rollout 1: revision 1 of its reward 'reward' is dam",
    "update rewards set part = 'style' where rollout_id = 2": "rollout 2: revision 0 of its reward 'style' is damaged",
    "update rewards set revision = 3 where rollout_id = 2": "rollout 2: revision 3 of its reward 'reward' is damaged",
    "update rewards set late = 7 where revision = 1": "rollout 1: revision 1 of its reward 'reward' is damaged",
    "update uses set advantage = -0.5 where rollout_id = 1": "rollout 1: its use at version 3 (age, advantage,",
    "update uses set advantage = null where rollout_id = 3": "rollout 3: its use at version 3",
    "update uses set age = 1 where rollout_id = 1": "rollout 1: its use at version 3",
    "update uses set revision = 0 where rollout_id = 1": "rollout 1: its use at version 3",
    "update uses set group_number = 4 where rollout_id = 1": "rollout 1: its use at version 3",
    "update uses set version = 4 where rollout_id = 3": "rollout 3: its use at version 4",
    "delete from rewards where revision = 1": "rollout 1: it had 2 rewards, but the store has 1",
    "delete from rewards where rollout_id = 4": "rollout 4: it had 1 rewards, but the store has 0",
    "delete from uses where rollout_id = 3": "rollout 3: it had 1 uses, but the store has 0",
}
"""Statement that both databases know, and the one complaint that it leads to."""
ONLY_SQLITE = {
    "update rollouts set sequences = cast(substr(sequences, 2) as blob) where id = 2": ["rollout 2: its tokens are"],
    "update rollouts set version = 7 where id = 1": ["rollout 1: its tokens are of version 0, its row says 7",
                                                     ANOTHER.format(1)],
    "update rollouts set checksum = null, sequences = x'0100' where id = 2": ["rollout 2: store: damaged sequence"],
    "insert into rewards (rollout_id, part, revision, value, source, created) values (99, 'reward', 0, 1.0, 'x', 0)":
        ["rewards: rows belong to rollout 99"],
    "insert into uses (version, rollout_id) values (4, 98)": ["uses: rows belong to rollout 98"],
    "delete from rollouts where id = 5": ["rewards: rows belong to rollout 5", "rollout 5 is missing"],
}  # fmt: skip
"""SQLite lets rows of nobody be written where it is not told to look."""


def fill(place) -> None:
    """Rollouts of the run and imported, late rewards, a step learned from, and one that a resume set aside."""
    ledger = Ledger(place)
    first, *more = rollouts("aab")
    first = dataclasses.replace(first, sampling=Sampling(0.7, 9), admission=5)
    ledger.add([first, *more])
    people = [dataclasses.replace(r, origin="human", lineage=None, text="é, as it was") for r in rollouts("cc")]
    ledger.add_imported(people)
    ledger.revise([(1, Reward(0.0, source="anna", position=1))])
    ledger.record([Use(1, 3, 2, 0.5, 1, group=0), Use(3, 3, None, -0.0, 0, group=1)])
    ledger.add(rollouts("d"))
    ledger.rewind(5, version=4, lineage="test")
    ledger.rewind(5, version=4, lineage="test")  # resumed twice
    ledger.close()


@pytest.fixture
def filled(place):
    fill(place)
    return place


def damage(place, statement: str) -> None:
    ledger = Ledger(place)
    with ledger.transaction(write=True) as connection:
        connection.exec_driver_sql(statement)
    ledger.close()


def test_a_whole_store_has_no_faults(filled):
    found = verify(filled)
    assert (found.rollouts, found.unsigned, found.complaints) == (6, 0, [])


@pytest.mark.parametrize("statement", DAMAGE)
def test_each_kind_of_damage_is_named(filled, statement):
    damage(filled, statement)
    (complaint,) = verify(filled).complaints
    assert complaint.startswith(DAMAGE[statement])


@pytest.mark.parametrize("statement", ONLY_SQLITE)
def test_rows_of_nobody_and_damaged_tokens_are_named(tmp_path, statement):
    path = tmp_path / "store.db"
    fill(path)
    with sqlite3.connect(path) as database:
        database.execute(statement)
    complaints = verify(path).complaints
    assert len(complaints) == len(ONLY_SQLITE[statement])
    for complaint, beginning in zip(complaints, ONLY_SQLITE[statement], strict=True):
        assert complaint.startswith(beginning)


@pytest.mark.parametrize("value", [-0.0, float("nan"), 1 / 3, 1e-300, 5])
def test_numbers_that_a_database_spells_otherwise_are_no_damage(place, value):
    """SQLite keeps neither a negative zero nor a NaN; a whole number comes back as a float."""
    ledger = Ledger(place)
    made = dataclasses.replace(rollouts("a")[0], sampling=Sampling(1, 9, 1))
    number = 0.0 if isnan(value) else value
    ledger.add([dataclasses.replace(made, rewards=(Reward(number),))])
    ledger.record([Use(1, 3, 2, value)])
    ledger.close()
    assert verify(place).complaints == []


def test_what_was_deferred_has_its_checksums_too(place):
    ledger = Ledger(place)
    store = Deferred(ledger)
    store.add(rollouts("aabb"))
    store.record([Use(r.id, 3, 0, 0.5, 0) for group in store.draw(2, 2) for r in group.rollouts])
    store.flush()
    ledger.close()
    assert (verify(place).unsigned, verify(place).complaints) == (0, [])
    damage(place, "update uses set group_number = 0 where rollout_id = 4")
    assert re.match("rollout 4: its use at version 3", verify(place).complaints[0])


def test_overwritten_pages_are_found(tmp_path):
    path = tmp_path / "store.db"
    ledger = Ledger(path)
    ledger.add(rollouts("aab"))
    ledger.record(use(1, 3))
    ledger.close()
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18])
    for page in range(1, len(data) // size):
        data[page * size : page * size + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(SoleraError, match="cannot be read as a store: database disk image is malformed"):
        verify(path)
