"""Rank 0 sends the weights to engines in Ray actors. The controller gets a copy, and sends it only to an engine that
comes back."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from solera.cluster import sending
from solera.cluster.actors import Actors
from solera.cluster.engines import EngineSpec
from solera.cluster.passing import packed
from solera.config import InFlight, Transport
from solera.engines import messages
from solera.engines.in_process import InProcessEngine
from solera.models.digest import describe
from solera.protocols import Weights
from solera.records import Manifest
from solera.sharded.learner import ShardedLearner
from solera.sharded.ranks import RankError, Ranks
from tests.cluster.hosts import seconds_until
from tests.cluster.ranks import Reusable, begin, embedded, spec_of
from tests.cluster.test_engines import SOURCE, Pool, publish
from tests.cluster.test_sharded import batch_of
from tests.learner.test_invariance import GRPO, make_groups

pytestmark = pytest.mark.cluster
OF_RANKS = 2.0
"""`cluster.timeout`. A rank that does not react is noticed after 6 seconds more."""
OF_ENGINES = 12.0
"""`engine.timeout`. Longer, so that an engine that hangs could be blamed on a rank."""
LIMIT = 30_000
"""Bytes of a message. Some of the model's tensors are larger, others are much smaller."""


@dataclass(frozen=True)
class NotingSpec(EngineSpec):
    """Its engines write down which tensors they got, in which order, and what they hold then."""

    folder: Path = Path()

    def open(self, number: int) -> InProcessEngine:
        engine = super().open(number)
        load = engine.load

        def load_and_note(weights: Weights, in_flight: InFlight = "drain") -> Manifest:
            came = list[str]()
            noted = ((came.append(name) or name, tensor) for name, tensor in weights.tensors)
            held = load(Weights(weights.lineage, weights.version, noted), in_flight)
            written = self.folder / f"{os.getpid()}-{weights.version}"
            torch.save((came, {name: p.detach() for name, p in engine.model.parameters().items()}), written)
            return held

        engine.load = load_and_note
        return engine


@dataclass
class Setup:
    """Two ranks, two engines, and what the controller did."""

    ranks: Ranks
    sharded: ShardedLearner
    pool: Pool
    folder: Path
    packed: list[str] = field(default_factory=list)
    """How each message went that the controller sent."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """What all ranks were asked."""

    def learn(self) -> dict[str, torch.Tensor]:
        """Returns the new weights."""
        self.sharded.update(batch_of(make_groups(self.sharded.version), self.sharded, self.sharded.spec))
        whole = self.ranks.call("whole", [()] * 2)[0]
        self.asked.clear()
        self.packed.clear()
        return whole

    def sync(self) -> Manifest:
        return self.pool.load(self.sharded.weights("torch.float32"))

    def noted(self, number: int) -> tuple[list[str], dict[str, torch.Tensor]]:
        return torch.load(self.folder / f"{self.pool.pids()[number]}-{self.sharded.version}")


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=["auto", "group"])
def opened(request, ray, tmp_path_factory) -> Iterator[Setup]:
    with open_setup(request.param, tmp_path_factory.mktemp("noted")) as setup:
        yield setup


@contextmanager
def open_setup(transport: Transport, folder: Path) -> Iterator[Setup]:
    ranks = Ranks(Actors(2, Reusable, OF_RANKS, None), OF_RANKS)
    spec = NotingSpec(SOURCE, torch.float32, 64, 1, folder=folder)
    pool = Pool(spec, transport=transport, timeout=OF_ENGINES)
    try:
        yield Setup(ranks, begin(ranks, spec_of(GRPO, load=embedded, lr=1e-3)), pool, folder)
    finally:
        pool.close()
        ranks.close()
        pool.events.call_soon_threadsafe(pool.events.stop)


@pytest.fixture
def setup(opened, monkeypatch) -> Setup:
    """Notes what is asked and sent. Messages are small."""
    call = opened.ranks.call

    def call_and_note(method, given):
        opened.asked.append((method, given[0]))
        return call(method, given)

    def packed_and_noted(tensor, how, group):
        opened.packed.append(how)
        return packed(tensor, how, group)

    monkeypatch.setattr(messages, "MESSAGE_BYTES", LIMIT)
    monkeypatch.setattr(opened.ranks, "call", call_and_note)
    monkeypatch.setattr(sending, "packed", packed_and_noted)
    opened.pool.said.clear()
    return opened


def connected(one: int, other: int) -> bool:
    """Whether two processes of this machine share a TCP connection."""

    def ends(pid: int) -> set[tuple[str, str]]:
        own = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
        tables = [Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
        found = [line.split() for table in tables for line in table]
        return {(f[1][-13:], f[2][-13:]) for f in found if f"socket:[{f[9]}]" in own}  # the last bytes, and the port

    theirs = ends(other)
    return any((far, near) in theirs for near, far in ends(one))


def test_rank_0_sends_the_weights_and_the_controller_keeps_a_copy(setup):
    first, second = (place.pid for place in setup.ranks.host.places)
    assert not any(connected(first, engine) for engine in setup.pool.pids())
    for _ in range(2):
        expected = setup.learn()
        held = setup.sync()
        assert held == Manifest("test", setup.sharded.version, describe(expected.items()))
        assert setup.packed == []  # nothing from here
        for number in range(2):
            came, params = setup.noted(number)
            assert came == list(expected)  # the order of the model
            assert all(torch.equal(params[name], tensor) for name, tensor in expected.items())
        kept = dict(setup.pool.weights().tensors)
        assert list(kept) == list(expected) and all(torch.equal(kept[name], expected[name]) for name in kept)
    assert all(connected(first, engine) for engine in setup.pool.pids())
    assert not any(connected(second, engine) for engine in setup.pool.pids())


def test_each_tensor_is_gathered_once_and_messages_are_bounded(setup):
    expected = setup.learn()
    held = setup.sync()
    assert setup.sharded.manifest("torch.float32") == held
    assert {method for method, _ in setup.asked} - {"sizes"} == {"gather", "let_go"}
    assert setup.asked[-1][0] == "let_go"  # rank 0 holds nothing any more
    together = [given[0] for method, given in setup.asked if method == "gather"]
    assert [name for names in together for name in names] == list(expected)
    sizes = [[expected[name].nbytes for name in names] for names in together]
    assert any(of_one == [max(of_one)] and max(of_one) > LIMIT for of_one in sizes)
    assert any(len(of_one) > 1 for of_one in sizes)
    assert all(len(of_one) == 1 or sum(of_one) <= LIMIT for of_one in sizes)
    assert all(sum(one) + other[0] > LIMIT for one, other in pairwise(sizes))  # none too many


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_during_a_sync_costs_only_itself(setup, monkeypatch, sent):
    setup.learn()
    setup.sync()
    expected, lost, pass_on, sends = setup.learn(), setup.pool.pids()[1], setup.ranks.pass_on, []

    def pass_on_and_kill(receivers):
        sends.append(len(receivers))
        if len(sends) == 3:
            os.kill(lost, sent)
        return pass_on(receivers)

    monkeypatch.setattr(setup.ranks, "pass_on", pass_on_and_kill)
    began = time.monotonic()
    held = setup.sync()
    took = time.monotonic() - began
    monkeypatch.setattr(setup.ranks, "pass_on", pass_on)
    assert held == Manifest("test", setup.sharded.version, describe(expected.items()))
    assert took < OF_ENGINES + 10
    assert sent != signal.SIGSTOP or took > OF_RANKS + 6  # and yet no rank was blamed
    assert sends[:3] == [2, 2, 2] and sends[-1] == 1
    assert any("is set aside: it missed the sync" in each for each in setup.pool.said), setup.pool.said
    assert all(torch.equal(setup.noted(0)[1][name], tensor) for name, tensor in expected.items())
    seconds_until(lambda: len(setup.pool.roster.serving()) == 2, 300, str(setup.pool.said))
    assert setup.packed  # it got the controller's copy
    assert all(torch.equal(setup.noted(1)[1][name], tensor) for name, tensor in expected.items())
    expected = setup.learn()
    setup.sync()
    assert setup.packed == []
    for number in range(2):
        assert all(torch.equal(setup.noted(number)[1][name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("sent", "says"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "did not answer")])
def test_a_rank_0_that_is_lost_while_it_sends_is_named_and_the_engines_do_not_wait_for_it(
    ray, tmp_path, monkeypatch, sent, says
):
    monkeypatch.setattr(messages, "MESSAGE_BYTES", LIMIT)
    with open_setup("auto", tmp_path) as setup:
        setup.learn()
        pass_on, sends = setup.ranks.pass_on, []

        def pass_on_and_kill(receivers):
            sends.append(receivers)
            if len(sends) == 3:
                os.kill(setup.ranks.host.places[0].pid, sent)
            return pass_on(receivers)

        monkeypatch.setattr(setup.ranks, "pass_on", pass_on_and_kill)
        with pytest.raises(RankError, match=rf"^rank 0 of 2 {says}.* in sending weights to engines"):
            setup.sync()
        assert not setup.pool.said  # no engine is blamed
        began = time.monotonic()
        publish(setup.pool, 100)
        assert time.monotonic() - began < OF_ENGINES
