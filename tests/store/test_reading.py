"""What was learned from, read back beside a ledger that is open, closed, or not there."""

import numpy as np
import pytest

from solera.config import DrawConfig
from solera.errors import SoleraError
from solera.records import PolicyVersion, Reward, Rollout, Sequence, Span, Use
from solera.store.ledger import Ledger
from solera.store.reading import reading
from solera.store.selected import Selected


def rollout(key: str, reward: float | None, token: int) -> Rollout:
    sequence = Sequence(np.array([3, token], np.int32), (Span(1, 2, 0),), np.array([-0.5], np.float32))
    return Rollout(key, (sequence,), () if reward is None else (Reward(reward),), lineage="a", finish_reason="length")


@pytest.fixture
def store(place):
    """At version 3 two groups of `p` and one of `q`, the last masked; at version 5 one rollout of `p` again."""
    ledger = Ledger(place)
    new = [("p", 1.0), ("q", 0.5), ("p", 0.0), ("q", 0.5), ("p", 1.0), ("p", None)]
    ids = ledger.add([rollout(key, reward, 10 + i) for i, (key, reward) in enumerate(new)])
    ledger.record([Use(id_, 3, 3, None if key == "q" else 0.25) for id_, (key, _) in zip(ids, new, strict=True)])
    ledger.record([Use(ids[0], 5, 5, -1.0)])
    yield ledger
    ledger.close()


def test_groups_as_they_were_drawn(store, place):
    with reading(place) as opened:
        assert opened.versions() == range(3, 6)
        groups = opened.used(3, group_size=2)
        assert [[r.id for r in used.group.rollouts] for used in groups] == [[1, 3], [5, 6], [2, 4]]
        assert [(used.differs, used.masked) for used in groups] == [(True, False), (False, False), (False, True)]
        assert [r.reward for r in groups[1].group.rollouts] == [1.0, None]
        assert groups[0].uses == (Use(1, 3, 3, 0.25), Use(3, 3, 3, 0.25))
        assert opened.used(4, group_size=2) == []
        (again,) = opened.used(5, group_size=2)
        assert again.uses == (Use(1, 5, 5, -1.0),)
        filled = opened.with_sequences(groups[0]).group.rollouts
        assert [r.sequences[0].token_ids_T.tolist() for r in filled] == [[3, 10], [3, 12]]
        assert [r.finish_reason for r in filled] == ["length", "length"]


def test_one_moment_is_read_while_another_writes(store, place):
    with reading(place) as opened:
        assert opened.versions() == range(3, 6)
        store.record([Use(1, 9, 9, 0.0)])  # would wait for half a minute and fail if the reader held it up
        assert opened.versions() == range(3, 6)
    with reading(place) as opened:
        assert opened.versions() == range(3, 10)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_closed_store_is_left_as_it_was(store, place):
    store.close()
    with reading(place) as opened:
        assert opened.versions() == range(3, 6)
    assert [path.name for path in place.parent.iterdir()] == ["store.db"]


def test_what_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(SoleraError, match="no such store"), reading(tmp_path / "store.db"):
        pass
    (tmp_path / "text.db").write_text("no database " * 100)
    complaint = "cannot be read as a store: file is not a database"
    with pytest.raises(SoleraError, match=complaint), reading(tmp_path / "text.db") as opened:
        opened.versions()


def foreign(key: str, origin: str, reward: float, token: int) -> Rollout:
    sequence = Sequence(np.array([5, 6, 7 + token], np.int32), (Span(1, 3, -1),), None)
    return Rollout(key, (sequence,), (Reward(reward),), None, origin)


TWO = ("human", "model:t")
CASES = {
    "newest, six answers, groups of four": (
        DrawConfig("offline", order="newest", min_rewarded=2), [("a", "human")] * 6, {(1, 2), (3, 4, 5, 6)},
    ),
    "between, two origins that take turns": (
        DrawConfig("mixed", shares=("human=1", "model:t=1"), min_rewarded=2, order="newest"),
        [("a", TWO[i % 2]) for i in range(8)], {(1, 3, 5, 7), (2, 4, 6, 8)},
    ),
    "within, the newest answers of each": (
        DrawConfig("mixed", shares=("human=1", "model:t=1"), mix="within", order="newest"),
        [("a", TWO[i // 4]) for i in range(8)], {(3, 4, 7, 8), (1, 2, 5, 6)},
    ),
    "two prompts": (
        DrawConfig("offline", order="newest"), [("ab"[i % 2], "human") for i in range(8)], {(1, 3, 5, 7), (2, 4, 6, 8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_groups_of_every_policy_are_read_as_they_were_drawn(place, case):
    draw, rows, expected = CASES[case]
    ledger = Ledger(place)
    ledger.add([foreign(key, origin, float(i % 2), i) for i, (key, origin) in enumerate(rows)])
    store = Selected(ledger, draw, 0)
    drawn = store.draw(8, 4, PolicyVersion("me", 0))
    store.record([Use(r.id, 0, None, 0.0, 0) for group in drawn for r in group.rollouts])
    ledger.close()
    with reading(place) as opened:
        groups = opened.used(0, 4)
    assert {tuple(r.id for r in used.group.rollouts) for used in groups} == expected
    assert [{r.id for r in used.group.rollouts} for used in groups] == [{r.id for r in g.rollouts} for g in drawn]
    assert not any(used.guessed for used in groups)
