"""Weights on their way to a real server: proven, refused, and changed while responses are written."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from solera.config import InFlight
from solera.engines.faults import TakenError
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.http import ServerError
from solera.engines.vllm.transport import FileTransport, GroupTransport
from solera.models.digest import describe
from solera.protocols import Weights
from solera.records import Completion, Sampling
from solera.run.parts import Parts
from solera.run.serving import open_server
from solera.sync.proof import SyncFaultError
from solera.tasks.event_loop import EventLoop
from tests.vllm.conftest import forward_logp, model_of, weights_of
from tests.vllm.proxy import Proxy, TruncateError

pytestmark = pytest.mark.vllm
CLOSE = 5e-4
NORM = "model.norm.weight"


def farthest(events: EventLoop, engine: VllmEngine, parts: Parts, version: int) -> float:
    """Largest difference between what the server writes now and a forward pass of that version."""
    prompt = parts.task.prompt(3).token_ids

    async def write() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, Sampling(0.7, 12), seed) for seed in range(6)))

    written = events.run(write())
    assert {version for completion in written for _, version in completion.versions} == {engine.held.version}
    return max(np.abs(c.behaviour_logp_T - forward_logp(version, prompt, c.token_ids_T, 0.7)).max() for c in written)


def test_new_weights_are_proven_and_written_with(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    assert farthest(events, engine, parts, 0) < CLOSE
    held = engine.load(weights_of(1))
    assert (held.lineage, held.version) == ("run", 1)
    assert set(held.tensors) == set(describe(weights_of(1).tensors))
    assert farthest(events, engine, parts, 1) < CLOSE  # the head, tied to the embedding, included
    assert farthest(events, engine, parts, 0) > 100 * CLOSE  # the versions can be told apart
    engine.load(weights_of(2))
    assert farthest(events, engine, parts, 2) < CLOSE


def test_the_engine_keeps_what_it_sent(engine: VllmEngine) -> None:
    engine.load(weights_of(1))
    kept = engine.weights()
    assert (kept.lineage, kept.version) == ("run", 1)
    sent = dict(weights_of(1).tensors)
    assert {name: torch.equal(tensor, sent[name]) for name, tensor in kept.tensors} == dict.fromkeys(sent, True)


def nan(named: dict[str, torch.Tensor]) -> None:
    named[NORM][3] = torch.nan


def wrong_shape(named: dict[str, torch.Tensor]) -> None:
    named[NORM] = named[NORM][:-1]


def missing(named: dict[str, torch.Tensor]) -> None:
    del named[NORM]


def unknown(named: dict[str, torch.Tensor]) -> None:
    named["model.other.weight"] = named[NORM].clone()


def rounded(named: dict[str, torch.Tensor]) -> None:
    named[NORM] = named[NORM].bfloat16()


def swapped(named: dict[str, torch.Tensor]) -> None:
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    named[one], named[other] = named[other], named[one]


BAD = [
    (nan, f"tensor {NORM} has values that are not finite"),
    (wrong_shape, rf"tensor {NORM} has shape \[63\], the model's is \[64\]"),
    (missing, f"tensor {NORM} is missing"),
    (unknown, "tensor model.other.weight is not one of the model's"),
    (rounded, f"tensor {NORM} is torch.bfloat16, the model computes in torch.float32"),
]


@pytest.mark.parametrize(("spoil", "complaint"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_update_is_refused_and_the_old_weights_go_on(
    engine: VllmEngine, parts: Parts, events: EventLoop, spoil: Callable[[dict], None], complaint: str
) -> None:
    before, named = engine.held, dict(weights_of(1).tensors)
    spoil(named)
    with pytest.raises(SyncFaultError, match=complaint):
        engine.load(Weights("run", 1, iter(named.items())))
    assert engine.held == before
    assert farthest(events, engine, parts, 0) < CLOSE
    assert engine.load(weights_of(1)).version == 1  # a good one afterwards is taken
    assert farthest(events, engine, parts, 1) < CLOSE


class Damaging(FileTransport):
    """Damages the file after it was written."""

    def __init__(self, folder: Path, damage: Callable[[Path], None]) -> None:
        super().__init__(folder)
        self.damage = damage

    def offer(self, label: str, named: dict[str, torch.Tensor]) -> dict[str, str]:
        source = super().offer(label, named)
        self.damage(Path(source["path"]))
        return source


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def swap(file: Path) -> None:
    named = load_file(file)
    swapped(named)
    save_file(named, file)


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, swap, Path.unlink])
def test_what_is_damaged_on_the_way_is_refused(
    engine: VllmEngine, parts: Parts, events: EventLoop, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    engine.updates.transport = Damaging(tmp_path / "damaged", damage)
    with pytest.raises(SyncFaultError, match="refused the weights and keeps the old ones"):
        engine.load(weights_of(1))
    assert farthest(events, engine, parts, 0) < CLOSE


def test_a_broadcast_brings_the_weights_too(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    engine.updates.transport = GroupTransport(torch.device("cpu"), "127.0.0.1")
    engine.updates._met = False
    for version in (1, 2):
        assert set(engine.load(weights_of(version)).tensors) == set(describe(weights_of(version).tensors))
        assert farthest(events, engine, parts, version) < CLOSE
    with pytest.raises(SyncFaultError, match="not finite"):
        engine.load(Weights("run", 3, iter((name, tensor * torch.nan) for name, tensor in weights_of(1).tensors)))
    assert farthest(events, engine, parts, 2) < CLOSE
    assert dict(engine.weights().tensors).keys() == dict(weights_of(2).tensors).keys()


LONGEST = 50


def written_during_syncs(
    events: EventLoop, engine: VllmEngine, parts: Parts, in_flight: InFlight, most: int
) -> list[Completion]:
    """Responses of many lengths, one after another in 24 rows, while the server gets version 1 and later ones: `most`
    of them, or fewer if a response has crossed a sync."""
    prompt = parts.task.prompt(3).token_ids
    engine.end_token_ids = ()
    written: list[Completion] = []
    first, synced = threading.Event(), threading.Event()

    async def row(number: int) -> None:
        while not synced.is_set():
            asked = Sampling(0.7, LONGEST - number)
            completion = await engine.generate(prompt, asked, seed=number + 24 * len(written))
            assert len(completion.token_ids_T) == asked.max_tokens
            written.append(completion)
            first.set()

    async def rows() -> None:
        await asyncio.gather(*map(row, range(24)))

    begun = events.begin(rows())
    first.wait(60)
    for version in range(1, most + 1):
        engine.load(weights_of(version), in_flight)
        if any(len(completion.versions) > 1 for completion in written):
            break
    synced.set()
    begun.result()
    return written


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_every_span_matches_a_forward_pass_of_its_own_version(
    engine: VllmEngine, parts: Parts, events: EventLoop, in_flight: InFlight
) -> None:
    prompt = parts.task.prompt(3).token_ids
    written = written_during_syncs(events, engine, parts, in_flight, most=50)
    assert any(len(completion.versions) > 1 for completion in written)
    for completion in written:
        versions = [version for _, version in completion.versions]
        assert versions == sorted(set(versions))
        start = 0
        for count, version in completion.versions:
            expected_T = forward_logp(version, prompt, completion.token_ids_T, 0.7)[start : start + count]
            assert np.abs(completion.behaviour_logp_T[start : start + count] - expected_T).max() < CLOSE
            start += count
        assert start == len(completion.token_ids_T)


def test_drain_finishes_everything_first(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    prompt = parts.task.prompt(3).token_ids
    written = written_during_syncs(events, engine, parts, "drain", most=3)
    assert len({version for completion in written for _, version in completion.versions}) > 1
    for completion in written:
        ((_, version),) = completion.versions
        expected_T = forward_logp(version, prompt, completion.token_ids_T, 0.7)
        assert np.abs(completion.behaviour_logp_T - expected_T).max() < CLOSE


def test_a_stale_prefix_cache_is_noticed(engine: VllmEngine, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pause, vLLM does not empty its cache."""

    @contextlib.contextmanager
    def unpaused(in_flight: InFlight) -> Iterator[None]:
        yield

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_paused", unpaused)
        with pytest.raises(SyncFaultError, match="prefix cache still holds older weights"):
            engine.load(weights_of(1))
    engine.load(weights_of(2))


def test_weights_of_somebody_else_are_noticed(
    engine: VllmEngine, parts: Parts, events: EventLoop, tmp_path: Path
) -> None:
    other = open_server(parts, engine.http.url, 8, tmp_path / "other")
    other.load(weights_of(1, "another run"))
    with pytest.raises(TakenError, match=r"did not send .*another run uses it"):
        farthest(events, engine, parts, 0)
    other.close()


def test_an_update_that_a_killed_trainer_left_open_is_no_obstacle(
    engine: VllmEngine, parts: Parts, events: EventLoop, tmp_path: Path
) -> None:
    engine.http.post("/pause?mode=keep")
    engine.http.post("/start_weight_update")
    again = open_server(parts, engine.http.url, 8, tmp_path / "again")
    again.load(weights_of(1))
    assert farthest(events, again, parts, 1) < CLOSE
    again.close()


def test_a_server_that_took_an_update_too_late_writes_nothing_before_it_is_connected_again(
    proxy: Proxy, parts: Parts, events: EventLoop, tmp_path: Path
) -> None:
    """It would label the new weights with the old version: what it writes at that moment is not finished, either."""
    ours, late = open_server(parts, proxy.url, 8, tmp_path / "ours"), iter([True])
    ours.load(weights_of(0))
    ours.end_token_ids = ()

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == "/update_weights" and answer is not None and next(late, False):
            raise TruncateError
        return answer

    proxy.spoil, before = spoil, proxy.generated
    writing = events.begin(ours.generate(parts.task.prompt(3).token_ids, Sampling(0.7, LONGEST), 0))
    while proxy.generated == before:
        time.sleep(0.001)
    with pytest.raises(ServerError, match=r"\(during the sync of version 1\)"):
        ours.load(weights_of(1), "keep")
    assert ours.http.get("/is_paused")["is_paused"]
    writing.cancel()
    ours.close()
    again = open_server(parts, proxy.url, 8, tmp_path / "again")
    assert not again.http.get("/is_paused")["is_paused"]
    assert again.load(weights_of(1)).version == 1
    assert farthest(events, again, parts, 1) < CLOSE
    again.close()


def test_model_of_the_reference_is_tied() -> None:
    """The trap this folder must catch: a head that is tied to the embedding."""
    model = model_of(0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
