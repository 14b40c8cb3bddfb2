"""Engines as Ray actors: what they hold and write is what an engine in this process would, and one that dies costs only
its requests."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from solera.cluster.bundles import Bundles
from solera.cluster.engines import ActorPool, EngineSpec, ahead_of
from solera.config import Transport
from solera.engines.in_process import InProcessEngine
from solera.errors import BadRequestError
from solera.models.digest import describe
from solera.models.loading import Source
from solera.protocols import Weights
from solera.records import Manifest, Sampling
from solera.report.sinks import read_metrics
from tests.cluster.hosts import Hosts, seconds_until, two_hosts
from tests.cluster.runs import reached, weights_of, write
from tests.cluster.test_failures import runs
from tests.command import solera
from tests.test_account import assert_the_checkpoint_agrees, verified

pytestmark = pytest.mark.cluster
SOURCE = Source("embedded")
PROMPT = tuple(range(4, 9))


class Pool(ActorPool):
    """Two actors on this machine. Keeps its messages, and an event loop as a run does."""

    def __init__(
        self, spec: EngineSpec = EngineSpec(SOURCE, torch.float32, 64, 1),  # noqa: B008 (frozen)
        transport: Transport = "auto", timeout: float = 15.0, bundles: Bundles | None = None,
    ) -> None:  # fmt: skip
        self.said: list[str] = []
        self.counted: list[int] = []
        super().__init__(
            spec, 2, cpus=2, address=None, timeout=timeout, tell=self.counted.append, say=self.said.append,
            transport=transport, bundles=bundles,
        )  # fmt: skip
        self.events = asyncio.new_event_loop()
        threading.Thread(target=self.events.run_forever, daemon=True).start()

    def write(self, requests: int, tokens: int = 8):
        """Ask for so many responses; returns a future of all of them."""

        async def ask():
            asked = (self.generate(PROMPT, Sampling(1.0, tokens), seed) for seed in range(requests))
            return await asyncio.gather(*asked)

        return asyncio.run_coroutine_threadsafe(ask(), self.events)

    def pids(self) -> list[int]:
        return [int(member.name.split("process ")[1].split()[0]) for member in self.members]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    opened = Pool()
    yield opened
    if not opened.roster.closing.is_set():
        opened.close()
    opened.events.call_soon_threadsafe(opened.events.stop)


def moved(version: int) -> dict[str, torch.Tensor]:
    """Other weights for every version."""
    model, _ = SOURCE.load(torch.device("cpu"))
    torch.manual_seed(version)
    return {name: p.detach() + 0.01 * torch.randn_like(p) for name, p in model.parameters().items()}


def publish(pool: Pool, version: int) -> Manifest:
    tensors = moved(version)
    held = pool.load(Weights("run", version, iter(tensors.items())))
    assert held == Manifest("run", version, describe(tensors.items()))
    return held


def test_an_actor_holds_the_weights_that_were_sent_and_writes_what_an_engine_in_this_process_writes(pool):
    publish(pool, 1)
    model, codec = SOURCE.load(torch.device("cpu"))
    here = InProcessEngine(model, codec.end_token_ids, 64, torch.float32)
    here.load(Weights("run", 1, iter(moved(1).items())))
    for member in pool.members:
        assert member.engine.held.version == 1

        async def both(engine=member.engine):
            requests = [(PROMPT, Sampling(1.0, 8), seed) for seed in range(6)]
            return [await asyncio.gather(*(e.generate(*each) for each in requests)) for e in (engine, here)]

        there, expected = asyncio.run_coroutine_threadsafe(both(), pool.events).result(180)
        for one, other in zip(there, expected, strict=True):
            assert (one.token_ids_T == other.token_ids_T).all() and one.versions == other.versions
            assert np.allclose(one.behaviour_logp_T, other.behaviour_logp_T, atol=1e-5)


def test_requests_wait_in_an_actor_only_if_its_engine_can_take_them_one_by_one(pool):
    """Plain decoding takes the rest of a burst only when it is idle: of 72 requests, 8 would wait for all others."""
    model, codec = SOURCE.load(torch.device("cpu"))
    both = (model, model.copy(torch.float32).with_plans())
    engines = [InProcessEngine(each, codec.end_token_ids, 64, torch.float32) for each in both]
    assert list(map(ahead_of, engines)) == [0, 8]
    assert [member.limit for member in pool.members] == [64, 64]


def test_a_text_that_the_model_cannot_read_is_refused_and_the_engine_goes_on(pool):
    publish(pool, 2)
    before = list(pool.said)
    with pytest.raises(BadRequestError, match="token id 100000 is not one of the model's"):
        asyncio.run_coroutine_threadsafe(pool.generate((100000,), Sampling(1.0, 4), 0), pool.events).result(180)
    assert len(pool.write(4).result(180)) == 4 and pool.said == before


@pytest.mark.parametrize(("sent", "version"), [(signal.SIGKILL, 3), (signal.SIGSTOP, 5)])
def test_an_engine_that_is_lost_costs_its_requests_only_and_comes_back_with_the_current_weights(pool, sent, version):
    publish(pool, version)
    pool.write(8).result(180)
    pool.said.clear()
    asked, lost = pool.write(300, tokens=60), pool.pids()[1]
    os.kill(lost, sent)
    began = time.monotonic()
    completions = asked.result(300)
    assert len(completions) == 300 and all(c.versions[-1][1] == version for c in completions)
    print(f"{sent.name} of an engine: its requests are answered after {time.monotonic() - began:.1f} s")
    publish(pool, version + 1)  # while one engine is missing
    seconds_until(lambda: len(pool.roster.serving()) == 2, 300, str(pool.said))
    print(f"{sent.name} of an engine: it is back after {time.monotonic() - began:.1f} s")
    assert not runs(lost)
    assert [member.engine.held.version for member in pool.members] == [version + 1] * 2
    assert all(c.versions == ((len(c.token_ids_T), version + 1),) for c in pool.write(20).result(180))
    assert any(f"engine 1 (process {lost}" in s and "is set aside" in s for s in pool.said), pool.said
    assert f"is back with the weights of version {version + 1}" in pool.said[-1]
    returned = sum(len(c.token_ids_T) for c in completions)
    assert pool.counted == sorted(pool.counted) and pool.counted[-1] >= returned
    assert pool.sampled == pool.counted[-1]


def test_engines_can_be_closed_while_one_is_being_started_again(pool):
    """As at the end of a run that lost an engine shortly before. Ray ends a process if a thread calls it too late."""
    publish(pool, 7)
    pool.said.clear()
    os.kill(pool.pids()[0], signal.SIGKILL)
    assert len(pool.write(8).result(300)) == 8
    seconds_until(lambda: any("is set aside" in sentence for sentence in pool.said), 60, str(pool.said))
    began = time.monotonic()
    pool.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("solera-engine")]
    assert time.monotonic() - began < 60


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts((3, 1)) as hosts:
        yield hosts


def test_adapters_travel_from_ranks_to_engines_and_the_run_is_that_of_one_process(tmp_path: Path):
    lora, folders = ("--lora.rank", "4", "--learn.lr", "3e-3"), []
    for name, learners in (("alone", 0), ("apart", 2)):
        engines = ("--cluster.engines", "2") if learners else ()
        ended = solera("train", write(tmp_path, name, learners, "ray"), *lora, *engines)
        assert ended.returncode == 0, ended.stderr
        folders.append(tmp_path / name)
    alone, apart = (read_metrics(folder / "metrics.jsonl") for folder in folders)
    assert len(apart) == len(alone) and apart[0]["reward/mean"] == alone[0]["reward/mean"]
    norms = [[row["learn/grad_norm"] for row in rows if "learn/grad_norm" in row] for rows in (alone, apart)]
    assert norms[1][:2] == pytest.approx(norms[0][:2], rel=1e-3) and len(norms[0]) > 2
    synced = [row["sync/faults"] for row in apart if "sync/faults" in row]
    assert len(synced) > 1 and not any(synced)
    before, own, other = SOURCE.load(torch.device("cpu"))[0].parameters(), *map(weights_of, folders)
    for name, tensor in own.items():  # the adapters are merged into them
        torch.testing.assert_close(other[name], tensor, atol=0.02, rtol=0)
    assert max(float((own[name] - before[name]).detach().abs().max()) for name in own) > 0.02


def test_learners_on_one_host_and_engines_on_both_one_of_which_is_killed(hosts, tmp_path: Path):
    """Weights travel through process groups: the engine on the other host must know this one's address."""
    file = write(tmp_path, "run", runtime="ray", address=f'"{hosts.address}"', engines=2, timeout=60.0)
    file.write_text(file.read_text().replace("sync = { ", 'sync = { transport = "group", '))
    folder, said = tmp_path / "run", tmp_path / "said"
    process = hosts.first.solera("train", file, said=said)
    try:
        reached(folder, 4, process)
        assert [len(host.ranks()) for host in hosts.both] == [2, 0]
        assert [len(host.engines()) for host in hosts.both] == [1, 1]
        os.kill(hosts.second.engines()[0], signal.SIGKILL)
        assert process.wait(900) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()
    text = " ".join(said.read_text().split())
    assert "2 engines generate: engine 0 (process" in text and "10.93.0.2) is set aside" in text
    assert "Traceback" not in text and " ERROR " not in text
    assert 'transport = "group"' in (folder / "config.toml").read_text()
    rows = read_metrics(folder / "metrics.jsonl")
    assert len(rows) == 15  # the evaluation before the first step has a row too
    assert all(row["sync/faults"] == 0 for row in rows if "sync/faults" in row)
    assert assert_the_checkpoint_agrees(folder).difference == 0
    assert verified(folder).returncode == 0
