"""The catalogue against the tables read row by row: the same arrays, bit for bit, and so the same draws."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest

from solera.config import DrawConfig
from solera.records import PROBE, Reward, Rollout, Use
from solera.store import catalogue
from solera.store.catalogue import Catalogue
from solera.store.drawing import NO_AGE, Rows, Selection, rank
from solera.store.ledger import Ledger
from tests.conftest import random_rollout

KEYS = ["plain", 'a "quoted" key', "two\nlines", "a, [b]", "\\back\\n", "ünïcode ☃ 𝔘", "\x1f", "null", "7"]
VALUES = [0.0, 1.0, -2.5, 0.1, 1 / 3, 1e-300, 1e12, 0.1 + 2**-53, 16_777_217.0]
"""Some that JSON in SQLite would round."""


@pytest.fixture
def ledger(place):
    opened = Ledger(place)
    with opened.transaction() as connection:
        if connection.dialect.name == "postgresql":  # rows in the order that they were last changed in
            connection.exec_driver_sql("SET enable_indexscan = off; SET enable_bitmapscan = off")
    yield opened
    opened.close()


def made(rng: np.random.Generator) -> Rollout:
    rollout = random_rollout(rng, 0, (2, 3), 0.0)
    lineage, origin = [("test", "self"), ("test", PROBE), ("other", "file:a"), (None, "human")][rng.integers(4)]
    revisions = [(), (0,), (0, 1), (1, 4)][rng.integers(4)]  # a rollout may bring a history
    rewards = [Reward(float(rng.choice(VALUES)), "first", revision=revision) for revision in revisions]
    if rng.random() < 0.5:
        rewards.append(Reward(float(rng.choice(VALUES)), "second"))
    return dataclasses.replace(
        rollout, prompt_key=str(rng.choice(KEYS)), lineage=lineage, origin=origin, rewards=tuple(rewards),
        admission=int(rng.integers(9)) if origin == "self" else None,
    )  # fmt: skip


def happen(ledger: Ledger, rng: np.random.Generator, version: int) -> list[int]:
    """Something is added, learned from and graded; returns what was learned from."""
    ledger.add([made(rng) for _ in range(40)])
    foreign = (dataclasses.replace(made(rng), origin="model:x", lineage=None, rewards=()) for _ in range(5))
    ledger.add_imported(list(foreign))
    with ledger.transaction() as connection:
        drawable = f"select id from rollouts where superseded = 0 and origin != '{PROBE}'"
        ids = [id_ for (id_,) in connection.exec_driver_sql(drawable)]
    used = sorted({int(id_) for id_ in rng.choice(ids, 20)})
    ledger.record([Use(id_, version, None, None) for id_ in used])
    ledger.revise([(int(id_), Reward(float(rng.choice(VALUES)), "first")) for id_ in rng.choice(ids, 9)])
    return used


def row_by_row(ledger: Ledger, lineage: str) -> tuple[Rows, list[str], tuple[str, ...]]:
    with ledger.transaction() as connection:
        query = "select id, prompt_key, origin, lineage, version, uses, admission, superseded from rollouts order by id"
        rollouts = connection.exec_driver_sql(query).all()
        query = "select rollout_id, part, value from rewards order by rollout_id, part, revision"
        latest: dict[int, dict[str, float]] = defaultdict(dict)
        for id_, part, value in connection.exec_driver_sql(query):
            latest[id_][part] = value
    keys, origins = dict[str, int](), dict[str, int]()
    rows = []
    for id_, key, origin, written_by, version, uses, admission, superseded in rollouts:
        if superseded or origin == PROBE:
            continue
        key_number, origin_number = keys.setdefault(key, len(keys)), origins.setdefault(origin, len(origins))
        age = version if version is not None and written_by == lineage else NO_AGE
        reward = sum(latest[id_].values()) if id_ in latest else np.nan
        rows.append((id_, key_number, origin_number, age, uses, reward, -1 if admission is None else admission))
    rows.sort(key=lambda row: (row[1], row[0]))
    types = (np.int64, np.int32, np.int16, np.int32, np.int32, np.float32, np.int32)
    columns = zip(*rows, strict=True)
    return Rows(*[np.array(c, t) for c, t in zip(columns, types, strict=True)]), list(keys), tuple(origins)


@pytest.mark.parametrize("together", [7, 50_000])
@pytest.mark.parametrize("seed", range(3))
def test_the_catalogue_holds_what_the_tables_do(ledger, monkeypatch, together, seed):
    monkeypatch.setattr(catalogue, "READ_TOGETHER", together)
    rng = np.random.default_rng(seed)
    happen(ledger, rng, 0)
    watermark = ledger.watermark()
    happen(ledger, rng, 1)
    ledger.rewind(watermark, version=1, lineage="test")
    followed = Catalogue("test")
    for version in (2, 3, 4):
        with ledger.transaction() as connection:
            followed.refresh(connection)
        followed.used(set(happen(ledger, rng, version)) & set(followed.rows.id_R.tolist()))
        expected, keys, origins = row_by_row(ledger, "test")
        for held in (followed, Catalogue("test")):
            with ledger.transaction() as connection:
                held.refresh(connection)
            assert (held.keys, held.origins) == (keys, origins)
            for name, expected_R, held_R in zip(Rows._fields, expected, held.rows, strict=True):
                assert (held_R.dtype, held_R.tobytes()) == (expected_R.dtype, expected_R.tobytes()), name


@pytest.mark.parametrize("order", ["uniform", "newest", "priority"])
@pytest.mark.parametrize("policy", ["fresh", "replay", "offline"])
def test_the_same_groups_are_drawn_as_from_rows_read_one_by_one(ledger, policy, order):
    rng = np.random.default_rng(9)
    for version in range(3):
        happen(ledger, rng, version)
    held, (expected, _, origins) = Catalogue("test"), row_by_row(ledger, "test")
    with ledger.transaction() as connection:
        held.refresh(connection)
    selection = Selection(DrawConfig(policy, order=order, min_spread=0.05), 3, 5, 0, origins, 6)
    drawn, wanted = [
        [rows.id_R[members].tolist() for members in rank(rows, selection).take(6)] for rows in (held.rows, expected)
    ]
    assert drawn == wanted
    assert len(drawn) > 2
