"""Writing behind: what the ledger says of itself is the same, sooner; what goes wrong is heard of at the next call."""

import dataclasses
import signal
import time
from threading import Event

import numpy as np
import pytest
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from solera.config import DrawConfig
from solera.records import Group, Reward, Rollout, Use
from solera.store.behind import WritingBehind
from solera.store.database import open_for_reading
from solera.store.ledger import Ledger
from solera.store.selected import Selected
from tests.conftest import random_rollout
from tests.store.test_ledger import drawn, rollouts, use


class Slow(WritingBehind):
    """Writes no row before it is told to."""

    def __init__(self, place) -> None:
        self.may_write = Event()
        super().__init__(place)

    def _insert(self, numbered) -> None:
        assert self.may_write.wait(timeout=10)
        super()._insert(numbered)


@pytest.fixture
def slow(place):
    ledger = Slow(place)
    assert ledger.draw(1, 1) == []
    yield ledger
    ledger.may_write.set()
    ledger.close()


def rows(place, table: str = "rollouts") -> int:
    """As another process sees them."""
    with open_for_reading(place) as database:
        return database.exec_driver_sql(f"select count(*) from {table}").scalar_one()


def test_what_is_added_is_drawn_before_it_is_written(slow, place):
    probe = [dataclasses.replace(rollout, origin="probe") for rollout in rollouts("aa")]
    assert slow.add([*rollouts("ab"), *probe, *rollouts("a"), *rollouts("b", reward=None)]) == [1, 2, 3, 4, 5, 6]
    assert drawn(slow, 5, 2) == [("a", [1, 5])]
    assert rows(place) == 0
    slow.may_write.set()
    slow.record(use(1, 5))
    assert rows(place) == 6
    assert (slow.waiting(1), rows(place, "uses")) == (1, 2)


def test_closing_waits_for_the_last_write(slow, place):
    slow.may_write.set()
    slow.add(rollouts("aa"))
    slow.record(use(1, 2))
    slow.close()
    assert (rows(place), rows(place, "uses")) == (2, 2)


def test_an_interrupted_wait_leaves_the_write_to_the_next_call(slow):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    slow.add(rollouts("aa"))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        slow.watermark()
    signal.signal(signal.SIGALRM, before)
    slow.may_write.set()
    assert (slow.watermark(), slow.waiting(2)) == (2, 1)


class Slower(WritingBehind):
    """So slow that whoever draws at once comes before the rows."""

    def _insert(self, numbered) -> None:
        time.sleep(0.003)
        super()._insert(numbered)


def test_what_is_not_in_memory_is_waited_for(place):
    """Text of others, and what was given a reward since."""
    ledger, other = Slower(place), Ledger(place)
    assert ledger.draw(1, 1) == []
    ledger.add(rollouts("aa"))
    ledger.watermark()
    other.add_reward(1, Reward(0.25, part="style"))
    other.add(rollouts("c"))
    ledger.add(rollouts("bbc"))
    assert [rollout.reward for rollout in ledger.draw(1, 2)[0].rollouts] == [1.25, 1.0]
    assert ledger._writing is None
    ledger.record(use(1, 2))
    ledger.add(rollouts("d"))
    assert drawn(ledger, 2, 2) == [("c", [3, 6]), ("b", [4, 5])]
    assert ledger._writing is None
    ledger.close()
    other.close()


@pytest.fixture
def behind(place):
    ledger = WritingBehind(place)
    ledger.draw(1, 1)
    yield ledger
    ledger.close()


def bad() -> list[Rollout]:
    """A row that no table takes."""
    (rollout,) = rollouts("b")
    object.__setattr__(rollout, "finish_reason", None)
    return [*rollouts("b"), rollout]


def test_what_went_wrong_is_raised_once_and_nothing_of_it_stays(behind, place):
    assert behind.add(bad()) == [1, 2]
    with pytest.raises(IntegrityError, match=r"(?i)not.null"):
        behind.watermark()
    assert behind.watermark() == 0
    other = Ledger(place)  # the lock is free, and so are the ids
    assert other.add(rollouts("cc")) == [1, 2]
    (group,) = behind.draw(1, 2)
    assert [rollout.prompt_key for rollout in group.rollouts] == ["c", "c"]
    behind.record(use(1))
    behind.record(use(2, 2))  # twice in a step: the table's key is broken
    with pytest.raises(IntegrityError):
        behind.draw(1, 1)
    assert drawn(other, 9, 1) == [("c", [2])]
    other.close()


def test_what_went_wrong_last_is_raised_on_closing(place):
    ledger = WritingBehind(place)
    ledger.add(bad())
    with pytest.raises(IntegrityError):
        ledger.close()
    assert Ledger(place).add(rollouts("a")) == [1]


def test_a_full_disk_is_told_in_one_line(tmp_path):
    ledger = WritingBehind(tmp_path / "store.db")
    with ledger.transaction() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 1}")
    ledger.add(rollouts("a" * 1000))
    with pytest.raises(OSError, match=r"the store cannot be used: database or disk is full.*store\.db") as refusal:
        ledger.missing(1, 1, 0)
    assert "\n" not in str(refusal.value)
    ledger.close()


def test_only_a_ledger_that_is_drawn_from_lists_what_can_be_drawn(place):
    """A policy of its own ranks what the store holds; there may be millions."""
    ledger, listed = WritingBehind(place), list[str]()
    store = Selected(ledger, DrawConfig(policy="replay"), 0, lambda: (5, "test"))

    @event.listens_for(ledger._engine, "before_cursor_execute")
    def note(connection, cursor, statement, *rest) -> None:
        if statement.startswith("SELECT rollouts.id, rollouts.prompt_key \n"):
            listed.append(statement)

    store.add(rollouts("aa"))
    assert drawn(store, 1, 2) == [("a", [1, 2])]
    store.add(rollouts("bb"))
    assert listed == []
    ledger.draw(1, 2)
    ledger.add(rollouts("cc"))
    ledger.draw(1, 2)
    assert len(listed) >= 2  # the first draw's own, and that of the writing after it
    ledger.close()


def told(groups: list[Group]) -> list[object]:
    """All that a draw gives."""
    return [
        (g.prompt_key, r.id, sorted(map(repr, r.rewards)), r.origin, r.sequences[0].token_ids_T.tolist())
        for g in groups
        for r in g.rollouts
    ]


class Play:
    """The same events for any ledger, by a seed: batches, probes, late rewards, imports, draws and uses."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger, self.other, self.rng = ledger, Ledger(ledger.place), np.random.default_rng(seed)
        self.version, self.unrewarded, self.seen = 0, list[int](), list[object]()
        self.did_not_wait = 0

    def batch(self) -> None:
        new = [random_rollout(self.rng, int(self.rng.integers(6)), (2, 3), 0.5) for _ in range(self.rng.integers(1, 9))]
        later = [bool(self.rng.random() < 0.15) for _ in new]
        origins = ["probe" if self.rng.random() < 0.1 else "self" for _ in new]
        ids = self.ledger.add(
            [
                dataclasses.replace(rollout, origin=origin, rewards=() if late else rollout.rewards)
                for rollout, origin, late in zip(new, origins, later, strict=True)
            ]
        )
        self.unrewarded += [i for i, o, late in zip(ids, origins, later, strict=True) if late and o == "self"]

    def reward(self) -> None:
        writer = self.ledger if self.rng.random() < 0.5 else self.other
        if self.unrewarded and self.rng.random() < 0.5:
            writer.add_reward(self.unrewarded.pop(), Reward(0.25))
        elif last := self.ledger.watermark():
            late = Reward(float(self.rng.random()), part=f"style {self.rng.random()}")
            writer.add_reward(int(self.rng.integers(max(1, last - 8), last + 1)), late)

    def bring(self) -> None:
        foreign = [random_rollout(self.rng, int(self.rng.integers(6)), (2, 3), 1.0) for _ in range(2)]
        (self.ledger if self.rng.random() < 0.3 else self.other).add_imported(
            [dataclasses.replace(rollout, origin="human", lineage=None) for rollout in foreign]
        )

    def draw(self) -> None:
        groups = self.ledger.draw(int(self.rng.integers(1, 4)), int(self.rng.integers(1, 4)))
        self.did_not_wait += getattr(self.ledger, "_writing", None) is not None
        self.seen += told(groups)
        if self.rng.random() < 0.7:
            self.ledger.record([Use(r.id, self.version, 0, 0.5) for group in groups for r in group.rollouts])
            self.version += 1

    def go(self, events: int) -> list[object]:
        for _ in range(events):
            chance = self.rng.random()
            if chance < 0.6:
                self.batch()
                self.draw()
            else:
                (self.batch, self.reward, self.bring, self.draw)[int(chance * 10) - 6]()
        self.seen.append(self.ledger.waiting(2))
        self.ledger.close()
        self.other.close()
        return self.seen


@pytest.mark.parametrize("seed", range(4))
def test_the_same_is_drawn_whether_it_is_waited_for_or_not(place, tmp_path, seed):
    behind, plain = Play(Slower(place), seed), Play(Ledger(tmp_path / "plain.db"), seed)
    assert behind.go(60) == plain.go(60)
    assert behind.did_not_wait > 5
    assert len(plain.seen) > 50
