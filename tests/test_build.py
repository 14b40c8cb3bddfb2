"""What a config is put together to."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from solera.config import ClusterConfig, Config, ModelConfig, RewardConfig, RunConfig
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.learner.learner import Learner
from solera.models.extent import largest
from solera.models.language_model import LanguageModel
from solera.report.sinks import TeeSink
from solera.run import build, parts
from solera.run.build import _graded_alone, _has_room_beside
from solera.run.own_code import OwnCode
from solera.run.parts import Parts, compute_of, device_of, resolved
from solera.store.ledger import Ledger
from tests.models.architectures import SIZES, make


@pytest.mark.parametrize(
    ("functions", "own", "alone"),
    [
        ((), OwnCode(), True),
        (("number", "boxed", "math"), OwnCode(), True),
        (("number", "rewards.py:brevity"), OwnCode(), False),
        ((), OwnCode(rewards=(len,)), False),
        ((), OwnCode(task=lambda codec: None), False),
    ],
)
def test_functions_of_ones_own_are_given_whole_batches(functions, own, alone):
    config = Config(reward=RewardConfig(functions=functions))
    assert _graded_alone(Parts(config, None, None, None, torch.float32, own)) is alone


@pytest.mark.parametrize(
    ("device", "cores", "room"), [("cpu", 2, False), ("cpu", 3, True), ("cuda", 1, False), ("cuda", 2, True)]
)
def test_a_batch_is_written_ahead_where_a_core_is_left(monkeypatch, device, cores, room):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    assert _has_room_beside(torch.device(device)) is room


def test_a_limit_for_a_gpu_is_refused_on_a_processor():
    with pytest.raises(SoleraError, match="this run is on a CPU: remove it"):
        device_of(Config(run=RunConfig(device="cpu", gpu_memory=4.0)))


@pytest.mark.parametrize(
    ("chosen", "device", "embedding", "plans", "expected"),
    [
        ("auto", "cpu", 40_000.0, True, torch.float32),
        ("bfloat16", "cpu", 1.0, True, torch.bfloat16),
        ("auto", "cuda", 1.0, True, torch.float16),
        ("auto", "cuda", 40_000.0, True, torch.bfloat16),
        ("auto", "cuda", 1.0, False, torch.bfloat16),
        ("float16", "cuda", 40_000.0, True, torch.float16),
    ],
)
def test_the_arithmetic_follows_from_the_device_and_the_models_numbers(
    tiny, monkeypatch, chosen, device, embedding, plans, expected
):
    """The weights stay on the CPU. Some data has held-out prompts only."""
    weights, said = tiny.copy(torch.float32), []
    with torch.no_grad():
        weights.module.get_input_embeddings().weight[8] = embedding
    monkeypatch.setattr(parts, "largest", lambda model, texts: largest(weights, texts))
    model = SimpleNamespace(can_take_plans=plans, has_experts=False)
    task = SimpleNamespace(held_out=lambda count: [SimpleNamespace(token_ids=(7, 8))] * count)
    config = Config(model=ModelConfig(compute=chosen))
    assert compute_of(config, model, torch.device(device), task, said.append) == expected
    assert said == [] or f"using {expected}".replace("torch.", "") in said[0]
    assert bool(said) == (chosen == "auto" and device == "cuda" and plans)


def test_a_mixture_of_experts_is_computed_in_bfloat16(monkeypatch):
    monkeypatch.setattr(parts, "largest", lambda model, texts: 1.0)  # float16 would hold that
    model, task = LanguageModel(make("qwen3_moe")), SimpleNamespace(held_out=lambda count: [])
    assert not LanguageModel(make("qwen3")).has_experts
    sizes = SIZES | {"layer_types": ["conv", "full_attention"]}
    assert not LanguageModel(Lfm2ForCausalLM(Lfm2Config(**sizes))).has_experts  # which has convolutions
    model.can_take_plans = True
    assert compute_of(Config(), model, torch.device("cuda"), task) == torch.bfloat16
    with pytest.raises(SoleraError, match="a mixture of experts needs bfloat16"):
        compute_of(Config(model=ModelConfig(compute="float16")), model, torch.device("cuda"), task)


@pytest.mark.parametrize(
    ("chosen", "device", "begun", "expected"),
    [
        ("auto", "cuda", "bfloat16", torch.bfloat16),
        ("auto", "cuda", "float32", torch.float32),
        ("auto", "cpu", "float16", torch.float32),  # a processor has no other choice
        ("bfloat16", "cuda", "float16", torch.bfloat16),  # the user's own change counts
    ],
)
def test_a_run_goes_on_in_the_arithmetic_that_it_began_with(monkeypatch, chosen, device, begun, expected):
    monkeypatch.setattr(parts, "largest", lambda model, texts: 1.0)  # decided anew it would be float16
    model = SimpleNamespace(can_take_plans=True, has_experts=False)
    config, said = Config(model=ModelConfig(compute=chosen)), list[str]()
    assert compute_of(config, model, torch.device(device), SimpleNamespace(), said.append, begun) == expected
    assert said == ([f"using {begun}, as at the start of the run"] if (chosen, device) == ("auto", "cuda") else [])


@pytest.mark.parametrize(("learners", "engines", "loaded_on"), [(2, 2, "cpu"), (0, 1, "cuda"), (2, 0, "cuda")])
def test_with_ranks_and_engines_the_main_process_keeps_off_the_gpu(monkeypatch, learners, engines, loaded_on):
    asked, load = [], parts.Source.load

    def load_here(source, device):
        asked.append(device.type)
        return load(source, torch.device("cpu"))

    monkeypatch.setattr(parts, "device_of", lambda config: torch.device("cuda"))
    monkeypatch.setattr(parts.Source, "load", load_here)
    monkeypatch.setattr(parts, "largest", lambda model, texts: 1.0)
    config = resolved(Config(cluster=ClusterConfig(learners=learners, engines=engines)))
    found = parts.load_parts(config)
    assert asked == [loaded_on]
    assert found.device.type == "cuda"
    assert found.compute == (torch.bfloat16 if learners else torch.float16)


def test_a_loop_that_cannot_be_built_closes_what_it_has_opened(tmp_path, monkeypatch):
    """Servers and engines in actors would otherwise run until the process ends."""
    closed = list[str]()
    for part in (Learner, InProcessEngine):
        monkeypatch.setattr(part, "close", lambda self: closed.append(type(self).__name__))
    found = parts.load_parts(resolved(Config(run=RunConfig(device="cpu"))))
    monkeypatch.setattr(type(found.task), "held_out", lambda task, count: {}[count])
    store = Ledger(tmp_path / "store.db")
    with pytest.raises(KeyError):
        build.build_loop(found, store, TeeSink([]), tmp_path)
    store.close()
    assert closed == ["InProcessEngine", "Learner"]
