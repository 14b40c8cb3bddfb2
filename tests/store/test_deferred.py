"""Rows kept until nobody waits for them: the same is drawn and the same is written in the end, later."""

import dataclasses

import numpy as np
import pytest

from solera.errors import SoleraError
from solera.records import Group, Reward, Rollout, Use
from solera.store.database import open_for_reading
from solera.store.deferred import FIRST_UNWRITTEN, Deferred
from solera.store.ledger import Ledger
from tests.conftest import random_rollout
from tests.store.test_ledger import rollouts, visit


@pytest.fixture
def store(place):
    ledger = Ledger(place)
    yield Deferred(ledger)
    ledger.close()


def table(place, columns: str, name: str) -> list[tuple[object, ...]]:
    """As another process sees it."""
    with open_for_reading(place) as database:
        return [tuple(row) for row in database.exec_driver_sql(f"select {columns} from {name} order by 1, 2")]


def keys(groups: list[Group]) -> list[str]:
    return [group.prompt_key for group in groups]


def uses(groups: list[Group], version: int = 3) -> list[Use]:
    return [Use(rollout.id, version, 2, 0.5, rollout.revision) for group in groups for rollout in group.rollouts]


def test_a_step_is_written_when_told_under_ids_that_follow_those_there(store, place):
    store.ledger.add(rollouts("z"))
    store.add([*rollouts("aab"), *rollouts("b", reward=None)])
    groups = store.draw(5, 2)
    store.record(uses(groups))
    assert keys(groups) == ["a"] and groups[0].rollouts[0].id >= FIRST_UNWRITTEN
    assert len(table(place, "id, uses", "rollouts")) == 1
    store.flush()
    assert table(place, "id, prompt_key, uses", "rollouts") == [
        (1, "z", 0), (2, "a", 1), (3, "a", 1), (4, "b", 0), (5, "b", 0),
    ]  # fmt: skip
    assert table(place, "rollout_id, version, age, advantage, revision", "uses") == [
        (2, 3, 2, 0.5, 0), (3, 3, 2, 0.5, 0),
    ]  # fmt: skip
    assert table(place, "rollout_id, part, value", "rewards") == [(i, "reward", 1.0) for i in (1, 2, 3, 4)]
    store.flush()
    assert len(table(place, "id, uses", "rollouts")) == 5


def test_what_was_written_before_is_counted_once_for_every_step(store, place):
    store.ledger.add(rollouts("a"))
    for version in (3, 4):
        (new,) = store.add(rollouts("b"))
        store.record([Use(1, version, 0, 0.5), Use(new, version, 0, 0.5)])
    store.flush()
    assert table(place, "id, uses", "rollouts") == [(1, 2), (2, 1), (3, 1)]
    assert table(place, "version, rollout_id", "uses") == [(3, 1), (3, 2), (4, 1), (4, 3)]


def test_nothing_used_is_drawn_again_and_what_is_left_is_counted(store):
    store.ledger.add(rollouts("zz"))
    store.add(rollouts("aabbcc"))
    assert store.missing(6, 2, 0) == 2
    store.record(uses(store.draw(2, 2)))
    assert store.missing(6, 2, 1) == 5
    assert keys(store.draw(5, 2)) == ["b", "c"]
    store.flush()
    assert store.missing(6, 2, 1) == 5
    assert keys(store.draw(5, 2)) == ["b", "c"]


def test_of_a_large_store_little_is_read(store, monkeypatch):
    """Whatever waits there, a step asks for a few groups, twice."""
    store.ledger.add(rollouts("abcdefgh" * 250))
    store.record(uses(store.draw(2, 2)))
    listed, read = store.ledger.unused, list[int]()

    def watched():
        for row in listed():
            read.append(row[0])
            yield row

    monkeypatch.setattr(store.ledger, "unused", watched)
    assert store.missing(3, 2, 1) == 0
    assert len(store.draw(3, 2)) == 3
    assert max(read) < 50


def test_what_is_written_between_draw_and_use_is_used_under_its_new_id(store, place):
    store.add(rollouts("aab"))
    groups = store.draw(1, 2)
    store.flush()
    store.record(uses(groups))
    assert keys(store.draw(5, 1)) == ["b"]
    store.flush()
    assert table(place, "id, uses", "rollouts") == [(1, 1), (2, 1), (3, 0)]


def test_whoever_asks_for_more_than_a_draw_finds_it_written(store, place):
    for ask, expected in (
        (store.watermark, 1),
        (lambda: [rollout.id for rollout in store.fetch([2])], [2]),
        (lambda: store.add_reward(3, Reward(0.5, part="late")), None),
    ):
        store.add(rollouts("a"))
        assert ask() == expected
    assert len(table(place, "id, uses", "rollouts")) == 3
    assert store.draw(3, 1)[2].rollouts[0].reward == 1.5


def test_a_write_that_fails_is_raised_and_tried_again_by_the_next(store, place):
    store.add(rollouts("a"))
    (broken,) = rollouts("b")
    object.__setattr__(broken, "finish_reason", None)
    store.add([broken])
    for _ in range(2):
        with pytest.raises(Exception, match=r"(?i)not.null"):
            store.flush()
    assert table(place, "id, uses", "rollouts") == []
    assert keys(store.draw(1, 1)) == ["a"]


def test_rewards_of_the_same_part_are_refused_at_once(store):
    twice = dataclasses.replace(rollouts("a")[0], rewards=(Reward(1.0), Reward(0.0)))
    with pytest.raises(SoleraError, match="same part"):
        store.add([twice])
    assert store.watermark() == 0


def test_a_reopened_stream_knows_what_was_left_over(store, place):
    """Problem 0 took longest, so its ids are the highest. Problem 2 lacks a reward when problem 3 is used."""
    store.by_admission = True
    for problem, key, rewards in ((1, "b", "01"), (2, "c", "-1"), (3, "d", "01"), (0, "a", "01")):
        store.add(visit(problem, key, rewards))
    groups = store.draw(3, 2)
    assert keys(groups) == ["a", "b", "d"]
    store.record(uses(groups))
    store.flush()
    store.ledger.add_imported([dataclasses.replace(r, origin="human", lineage=None) for r in rollouts("zz")])
    assert store.draw(3, 2) == []  # a stream counts on its own being drawn in time
    again = Deferred(Ledger(place), by_admission=True)
    assert again.draw(9, 2) == []
    assert again.passed_over() == store.passed_over() == {"leftover": 1}
    again.ledger.revise([(3, Reward(0.5))])
    assert again.draw(9, 2) == store.draw(9, 2) == []
    again.ledger.close()


class Play:
    """The events of a run by a seed: batches, draws, uses; late rewards and imports by others."""

    def __init__(self, store: Deferred | Ledger, ledger: Ledger, seed: int) -> None:
        self.store, self.ledger, self.other = store, ledger, Ledger(ledger.place)
        self.rng, self.version, self.seen = np.random.default_rng(seed), 0, list[object]()
        self.visits = 0

    def visit(self) -> list[Rollout]:
        """Three attempts at one prompt."""
        key, self.visits = int(self.rng.integers(6)), self.visits + 1
        return [random_rollout(self.rng, key, (2, 3), 0.5).admitted(self.visits) for _ in range(3)]

    def step(self) -> None:
        new = [random_rollout(self.rng, int(self.rng.integers(6)), (2, 3), 0.5) for _ in range(self.rng.integers(0, 6))]
        new += [rollout for _ in range(self.rng.integers(3)) for rollout in self.visit()]
        late = self.rng.random(len(new)) < 0.15
        self.store.add([dataclasses.replace(r, rewards=()) if w else r for r, w in zip(new, late, strict=True)])
        self.seen.append(self.store.missing(5, 2, 1))
        groups = self.store.draw(int(self.rng.integers(1, 4)), int(self.rng.integers(1, 4)))
        self.seen += [
            (g.prompt_key, r.admission, str(r.rewards), r.sequences[0].token_ids_T.tolist())
            for g in groups
            for r in g.rollouts
        ]
        self.seen.append(dict(self.store.passed_over()))
        if self.rng.random() < 0.8:
            self.store.record(uses(groups, self.version))
            self.version += 1

    def others(self) -> None:
        self.store.flush()
        if self.rng.random() < 0.5:
            foreign = [random_rollout(self.rng, int(self.rng.integers(6)), (2, 3), 1.0) for _ in range(2)]
            self.other.add_imported([dataclasses.replace(r, origin="human", lineage=None) for r in foreign])
        elif last := self.other.watermark():
            self.other.revise([(int(self.rng.integers(max(1, last - 9), last + 1)), Reward(float(self.rng.random())))])

    def go(self, events: int) -> list[object]:
        for _ in range(events):
            chance = self.rng.random()
            (self.step if chance < 0.6 else self.others if chance < 0.8 else self.store.flush)()
        self.store.flush()
        self.seen += table(self.ledger.place, "id, uses, prompt_key, origin", "rollouts")
        self.seen += table(self.ledger.place, "version, rollout_id, revision, group_number", "uses")
        self.seen += table(self.ledger.place, "rollout_id, revision, part, value", "rewards")
        self.other.close()
        return self.seen


@pytest.mark.parametrize("seed", range(6))
def test_the_same_is_drawn_and_written_as_by_the_plain_ledger(store, tmp_path, seed):
    plain = Ledger(tmp_path / "plain.db")
    expected = Play(plain, plain, seed).go(80)
    assert Play(store, store.ledger, seed).go(80) == expected
    assert len(expected) > 100 and any(isinstance(seen, dict) and seen for seen in expected)
    plain.close()
