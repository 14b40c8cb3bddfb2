"""Damage that is done to a store behind its back is found and named."""

import sqlite3

import pytest

from solera.errors import SoleraError
from solera.store.ledger import Ledger
from solera.store.verifying import verify
from tests.store.test_ledger import rollouts, use

DAMAGE = {
    "update rollouts set sequences = cast(substr(sequences, 2) as blob) where id = 2": "rollout 2: its tokens are not",
    "update rollouts set version = 7 where id = 1": "rollout 1: its tokens are of version 0, its row says 7",
    "update rollouts set uses = 5 where id = 3": "rollout 3: says it was used 5 times, but 1 uses are recorded",
    "insert into rewards values (99, 'reward', 0, 1.0, 'x', 0, null, null)": "rewards: there is no rollout 99",
    "insert into uses values (4, 98, 0, 1.0, 0)": "uses: there is no rollout 98",
    "update rollouts set checksum = null, sequences = x'0100' where id = 2": "rollout 2: store: damaged sequence data",
}


@pytest.fixture
def path(tmp_path):
    ledger = Ledger(tmp_path / "store.db")
    ledger.add(rollouts("aab"))
    ledger.record(use(1, 3))
    ledger.close()
    return tmp_path / "store.db"


def test_a_whole_store_has_no_faults(place):
    ledger = Ledger(place)
    ledger.add(rollouts("aab"))
    ledger.record(use(1, 3))
    ledger.close()
    found = verify(place)
    assert (found.rollouts, found.unsigned, found.complaints) == (3, 0, [])


@pytest.mark.parametrize("statement", DAMAGE)
def test_each_kind_of_damage_is_named(path, statement):
    with sqlite3.connect(path) as database:
        database.execute(statement)
    (complaint,) = verify(path).complaints
    assert complaint.startswith(DAMAGE[statement])


def test_overwritten_pages_are_found(path):
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18])
    for page in range(1, len(data) // size):
        data[page * size : page * size + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(SoleraError, match="cannot be read as a store: database disk image is malformed"):
        verify(path)
