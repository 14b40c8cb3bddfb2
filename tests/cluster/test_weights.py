"""Weights travel to engines in Ray actors through process groups (gloo). An engine that is lost meanwhile costs only
its own group."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from solera.cluster import sending
from solera.cluster.passing import packed
from solera.engines import messages
from solera.engines.faults import EngineError
from solera.engines.groups import MeetingPoint
from solera.engines.messages import joined
from solera.models.digest import describe
from solera.protocols import Weights
from solera.records import Manifest
from tests.cluster.hosts import seconds_until
from tests.cluster.test_engines import Pool, moved, publish

pytestmark = pytest.mark.cluster
TIMEOUT = 5.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    opened = Pool(transport="group", timeout=TIMEOUT)
    yield opened
    opened.close()
    opened.events.call_soon_threadsafe(opened.events.stop)


@pytest.fixture
def ways(monkeypatch) -> list[str]:
    """Notes how each message is sent. A message of two tensors would be too large."""
    noted = []
    monkeypatch.setattr(messages, "MESSAGE_BYTES", 1)
    monkeypatch.setattr(
        sending, "packed", lambda tensor, how, group: noted.append(how) or packed(tensor, how, group)
    )  # fmt: skip
    return noted


def test_a_group_brings_what_the_object_store_brings(pool, ways):
    count = len(moved(1))
    first, second = (member.engine for member in pool.members)
    first.sender.transport = "store"
    publish(pool, 1)
    assert sorted(ways) == ["gloo"] * count + ["store"] * count
    assert first.held == second.held == Manifest("run", 1, describe(moved(1).items()))
    first.sender.transport = "group"
    ways.clear()
    publish(pool, 2)
    assert ways == ["gloo"] * (2 * count)
    assert first.held == second.held == Manifest("run", 2, describe(moved(2).items()))
    assert first.sender.group is not second.sender.group


def test_weights_that_an_engine_refuses_do_not_hold_the_group_up(pool):
    """It takes the tensors that are sent after the one it refused, and then says why."""
    publish(pool, 3)
    engine, tensors = pool.members[0].engine, moved(4)
    name = next(iter(tensors))
    tensors[name] = tensors[name][:-1].clone()
    began = time.monotonic()
    with pytest.raises(Exception, match=name):
        engine.load(Weights("run", 4, iter(tensors.items())))
    assert time.monotonic() - began < TIMEOUT
    publish(pool, 5)


def test_an_engine_that_cannot_reach_the_port_is_an_error_within_the_time_limit(pool, monkeypatch):
    sender = pool.members[0].engine.sender
    sender.close()

    class Elsewhere(MeetingPoint):
        """Says a port that nobody listens on."""

        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.port = 1

    monkeypatch.setattr(sending, "MeetingPoint", Elsewhere)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"^it did not join a process group at .*, port 1: .*sync.transport = store$"):
        sender.send(joined(moved(6)))
    assert time.monotonic() - began < TIMEOUT + 3
    monkeypatch.undo()
    publish(pool, 6)  # in a new group
    assert sender.group is not None


@pytest.mark.parametrize(("sent", "version"), [(signal.SIGKILL, 7), (signal.SIGSTOP, 9)])
def test_an_engine_that_is_lost_during_a_sync_misses_it_and_comes_back(pool, ways, sent, version):
    publish(pool, version - 1) if version == 7 else None
    pool.said.clear()
    other, lost, pid = *(member.engine for member in pool.members), pool.pids()[1]
    group, send, count = other.sender.group, lost.sender.send, []

    def send_and_kill(tensors):
        count.append(tensors)
        if len(count) == 4:
            os.kill(pid, sent)
        send(tensors)

    lost.sender.send = send_and_kill
    began = time.monotonic()
    publish(pool, version)
    assert time.monotonic() - began < TIMEOUT + 5
    assert 4 <= len(count) < len(moved(version))
    assert any("is set aside: it missed the sync" in each for each in pool.said), pool.said
    seconds_until(lambda: len(pool.roster.serving()) == 2, 300, str(pool.said))
    print(f"{sent.name} during a sync: the engine is back after {time.monotonic() - began:.1f} s")
    assert [member.engine.held.version for member in pool.members] == [version] * 2
    publish(pool, version + 1)
    assert pool.members[1].engine is not lost and pool.members[1].engine.held.version == version + 1
    assert pool.members[0].engine.sender.group is group  # nothing happened to the other one
    assert set(ways) == {"gloo"}
