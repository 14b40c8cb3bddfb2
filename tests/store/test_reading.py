"""What was learned from, read back beside a ledger that is open, closed, or not there."""

import numpy as np
import pytest

from solera.errors import SoleraError
from solera.records import Reward, Rollout, Sequence, Span, Use
from solera.store.ledger import Ledger
from solera.store.reading import reading


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
