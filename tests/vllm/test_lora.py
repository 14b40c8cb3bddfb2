"""LoRA with a real server: it gets the base once and adapters afterwards, and writes as the learner's own model does.

The servers of these tests cannot import peft (`conftest.py`).
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from solera.config import LoraConfig, parse
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.transport import GroupTransport
from solera.models.loading import load, with_adapter
from solera.models.merging import A, B
from solera.models.source import EMBEDDED
from solera.protocols import Weights
from solera.records import Completion, Sampling
from solera.report.sinks import read_metrics
from solera.run import running
from solera.run.parts import Parts
from solera.run.serving import open_server
from solera.sync.proof import SyncFaultError
from solera.tasks.event_loop import EventLoop
from tests.command import solera
from tests.vllm.conftest import weights_of
from tests.vllm.proxy import Proxy, SwallowError
from tests.vllm.test_streaming import even_digits, stored
from tests.vllm.test_streaming import forward_logp as forward_of

pytestmark = pytest.mark.vllm
CLOSE = 5e-4
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapted(parts: Parts) -> Parts:
    """The embedded model with adapters that do something."""
    model, _ = load("embedded", torch.device("cpu"))
    made = with_adapter(model, LoraConfig(rank=4, alpha=8.0), "embedded", seed=0)
    return replace(parts, model=made)


def set_version(parts: Parts, version: int) -> Weights:
    """Give the adapters values of their own, and return them as weights."""
    noise = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in parts.model.parameters().values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=noise))
    return Weights("run", version, ((name, p.detach().clone()) for name, p in parts.model.parameters().items()))


class Watched(Proxy):
    """Counts what passes to the server: bases, updates, and the names of the tensors in the updates."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.bases, self.names = 0, list[set[str]]()
        self.spoil = self.watch

    def watch(self, path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if answer is None and path == "/collective_rpc":
            self.bases += json.loads(request)["method"] == "solera_keep_base"
        if answer is None and path == "/update_weights":
            self.names.append({name for name, *_ in json.loads(request)["update_info"]["tensors"]})
        return answer


@pytest.fixture
def watched(url: str) -> Iterator[Watched]:
    proxy = Watched(url)
    yield proxy
    proxy.stop()


@pytest.fixture
def engine(adapted: Parts, parts: Parts, watched: Watched, tmp_path: Path) -> Iterator[VllmEngine]:
    """Connected to a server that holds whole weights, and no base of an earlier test."""
    with closing(open_server(parts, parts.config.engine.urls[0], 8, tmp_path / "before")) as before:
        before.load(weights_of(0))
    served = open_server(adapted, watched.url, 8, tmp_path / "weights")
    yield served
    served.close()


def farthest(events: EventLoop, engine: VllmEngine, parts: Parts, model: torch.nn.Module) -> float:
    """Largest difference between what the server writes and a forward pass of the model."""
    prompt = parts.task.prompt(3).token_ids

    async def write() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, Sampling(0.7, 12), seed) for seed in range(6)))

    apart = 0.0
    for completion in events.run(write()):
        expected_T = forward_of(model, np.array([*prompt, *completion.token_ids_T]), 0.7)[len(prompt) :]
        apart = max(apart, float(np.abs(completion.behaviour_logp_T - expected_T).max()))
    return apart


def test_the_base_is_sent_once_and_every_version_is_written_with(
    engine: VllmEngine, adapted: Parts, watched: Watched, events: EventLoop
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
    for version in range(3):
        held = engine.load(set_version(adapted, version))
        assert (held.lineage, held.version) == ("run", version)
        assert {spec.name for spec in held.tensors} == set(adapted.model.parameters())
        assert farthest(events, engine, adapted, adapted.model.module) < CLOSE  # peft's own layers
        assert farthest(events, engine, adapted, plain) > 100 * CLOSE
    assert watched.bases == 1
    assert watched.names == [set(adapted.model.parameters())] * 3
    sent = {name: p.detach() for name, p in adapted.model.parameters().items()}
    assert {name: torch.equal(tensor, sent[name]) for name, tensor in engine.weights().tensors} == dict.fromkeys(
        sent, True
    )


def test_a_run_that_connects_again_sends_the_base_only_if_it_is_gone(
    engine: VllmEngine, adapted: Parts, parts: Parts, watched: Watched, events: EventLoop, tmp_path: Path
) -> None:
    engine.load(set_version(adapted, 0))
    with closing(open_server(adapted, watched.url, 8, tmp_path / "again")) as again:
        again.load(set_version(adapted, 1))
        assert watched.bases == 1
        assert farthest(events, again, adapted, adapted.model.module) < CLOSE
    with closing(open_server(parts, watched.url, 8, tmp_path / "whole")) as whole:
        whole.load(weights_of(1))
    with closing(open_server(adapted, watched.url, 8, tmp_path / "later")) as later:
        later.load(set_version(adapted, 2))
        assert watched.bases == 2
        assert farthest(events, later, adapted, adapted.model.module) < CLOSE


def test_a_broadcast_brings_base_and_adapters_too(engine: VllmEngine, adapted: Parts, events: EventLoop) -> None:
    engine.updates.transport = GroupTransport(torch.device("cpu"), "127.0.0.1")
    for version in (1, 2):
        engine.load(set_version(adapted, version))
        assert farthest(events, engine, adapted, adapted.model.module) < CLOSE


def nan(named: dict[str, torch.Tensor]) -> None:
    named[LAYER + A][1, 2] = torch.nan


def endless(named: dict[str, torch.Tensor]) -> None:
    named[LAYER + A][:], named[LAYER + B][:] = 1e30, 1e30


def wrong_rank(named: dict[str, torch.Tensor]) -> None:
    named[LAYER + B] = named[LAYER + B][:, :-1].clone()


def missing(named: dict[str, torch.Tensor]) -> None:
    del named[LAYER + B]


def unknown(named: dict[str, torch.Tensor]) -> None:
    named["model.other" + A] = named[LAYER + A].clone()


BAD = [
    (nan, f"tensor {LAYER}{A} has values that are not finite"),
    (endless, f"tensor {LAYER}.weight has values that are not finite"),
    (wrong_rank, rf"tensor {LAYER}{B} has shape \[64, 3\], the model's is \[64, 4\]"),
    (missing, f"tensor {LAYER}{B} is missing"),
    (unknown, f"tensor model.other{A} is not one of the model's"),
]


@pytest.mark.parametrize(("spoil", "complaint"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_adapters_are_refused_and_the_old_ones_go_on(
    engine: VllmEngine, adapted: Parts, events: EventLoop, spoil: Callable[[dict], None], complaint: str
) -> None:
    engine.load(set_version(adapted, 1))
    named = dict(set_version(adapted, 2).tensors)
    spoil(named)
    with pytest.raises(SyncFaultError, match=complaint):
        engine.load(Weights("run", 2, iter(named.items())))
    set_version(adapted, 1)
    assert farthest(events, engine, adapted, adapted.model.module) < CLOSE


def test_adapters_for_another_base_are_refused(
    engine: VllmEngine, adapted: Parts, parts: Parts, events: EventLoop, tmp_path: Path
) -> None:
    """Somebody sends other weights between the base and the adapters."""
    engine.load(set_version(adapted, 1))
    offered = engine.updates.offer(set_version(adapted, 2))
    with closing(open_server(parts, engine.http.url, 8, tmp_path / "other")) as other:
        other.load(weights_of(0))
        engine.updates.labels |= other.updates.labels  # else the run says that another one uses the server
        with pytest.raises(SyncFaultError, match="the weights that these adapters belong to have not been sent"):
            engine.updates.apply(offered)


RUN = """
run = {{ root = "{root}", name = "run", steps = {steps}, device = "cpu" }}
model = {{ path = "{model}" }}
engine = {{ name = "vllm", urls = {urls} }}
lora = {{ rank = 4, alpha = 16.0, export = "adapter" }}
sampling = {{ max_tokens = 16, temperature = 1.2 }}
collect = {{ mode = "stream", prompts = 4, group_size = 4, max_age = 2 }}
sync = {{ period = 1, in_flight = "keep" }}
learn = {{ lr = 0.02 }}
diagnose = {{ every = 0 }}
evaluate = {{ every = 0, problems = 8 }}
checkpoint = {{ every = 1, keep = 100 }}
report = {{ tensorboard = false, progress = false }}
"""
STEPS = 6


def test_a_run_with_adapters_on_two_servers(urls: list[str], rambling: Path, tmp_path: Path) -> None:
    """Every stored token was written by the adapters of the version that the store names. The servers were started with
    another base. One of them misses a sync."""
    proxy, updates = Watched(urls[0]), [0]

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == "/update_weights" and answer is None:
            updates[0] += 1
            if updates[0] == 3:
                raise SwallowError
        return proxy.watch(path, request, answer)

    proxy.spoil = spoil
    text = RUN.format(root=tmp_path, steps=STEPS, model=rambling, urls=json.dumps([proxy.url, urls[1]]))
    console = Console(file=StringIO(), width=1000)
    running.train(parse(text, "test"), console, rewards=[even_digits])
    proxy.stop()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"vLLM server {proxy.url} is set aside: it missed the sync of version 2" in said, said
    run = tmp_path / "run"
    models = {0: AutoModelForCausalLM.from_pretrained(rambling).eval()}
    for folder in (run / "checkpoints").iterdir():
        base = AutoModelForCausalLM.from_pretrained(rambling)
        merged = PeftModel.from_pretrained(base, folder / "model").merge_and_unload().eval()
        models[int(folder.name.split("-")[-1])] = merged
    right, other = list[float](), list[float]()
    for rollout, _ in stored(run):
        (sequence,) = rollout.sequences
        for start, stop, version in sequence.spans:
            for model, apart in ((version, right), (version - 1 if version else 1, other)):
                expected_T = forward_of(models[model], sequence.token_ids_T, 1.2)[start:stop]
                apart.append(float(np.abs(sequence.behaviour_logp_T[start:stop] - expected_T).max()))
    assert max(right) < CLOSE
    assert np.median(other) > 5 * CLOSE  # the check can tell versions apart
    rows = read_metrics(run / "metrics.jsonl")
    assert all(row["sync/faults"] == 0 for row in rows if "sync/faults" in row)
    assert max(row["mismatch/logp"] for row in rows if "mismatch/logp" in row) < 1e-3


def test_the_commands_with_adapters(url: str, tmp_path: Path) -> None:
    """Train, resume, and judge the adapters that were exported, on the server and in process."""
    settings = tmp_path / "run.toml"
    settings.write_text(RUN.format(root=tmp_path, steps=2, model="embedded", urls=json.dumps([url])))
    trained = solera("train", settings)
    assert trained.returncode == 0, trained.stderr
    resumed = solera("train", "--resume", tmp_path / "run", "--run.steps", 4)
    assert resumed.returncode == 0, resumed.stderr
    assert not (tmp_path / "run" / "weights").exists()
    served, ours = tmp_path / "served.json", tmp_path / "ours.json"
    words = ("eval", tmp_path / "run" / "model", "--problems", 60, "--samples", 1)
    done = solera(*words, "--engine", "vllm", "--engine.urls", url, "--json", served)
    assert done.returncode == 0, done.stderr
    assert solera(*words, "--json", ours).returncode == 0
    (theirs,), (mine,) = (json.loads(file.read_text())["models"] for file in (served, ours))
    assert theirs["greedy"]["problems"] == mine["greedy"]["problems"]
