"""`learn.memory = "lean"`: whole runs, what they share, resume and refuse, and the gradient they compute."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from solera.config import Config, LearnConfig, LoraConfig, RunConfig, SyncConfig
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.learner import optimisers
from solera.models import loading, siblings
from solera.models.language_model import LanguageModel, with_capped_scores
from solera.records import Rollout, Sequence
from solera.run.build import build_loop
from solera.run.parts import load_parts, resolved
from solera.store.ledger import Ledger
from solera.training.collation import collate
from tests.command import solera, start
from tests.conftest import END
from tests.engines.test_in_process import ask, fresh_logp, ragged_requests
from tests.learner.test_invariance import make_groups, make_learner
from tests.learner.test_optimisers import Counting
from tests.models.architectures import ARCHITECTURES

SHORT = (
    "--learn.memory", "lean", "--run.steps", "6", "--run.device", "cpu", "--collect.prompts", "6",
    "--collect.group_size", "6", "--learn.passes", "2", "--evaluate.problems", "8", "--evaluate.every", "0",
    "--checkpoint.every", "2", "--report.tensorboard", "False", "--report.page", "False",
)  # fmt: skip


def rows(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in lines]


def lean(model: LanguageModel) -> LanguageModel:
    model.module.float()
    return model.in_bfloat16()


@pytest.mark.parametrize(
    "further",
    [
        ("--sync.period", "1", "--lora.rank", "4"),
        ("--sync.period", "3", "--objective.beta", "0.02", "--objective.ref_period", "3"),
    ],
    ids=["lora", "all weights and a reference"],
)
def test_a_killed_run_ends_with_the_same_bits(tmp_path, further):
    """The real command, killed with SIGKILL after a checkpoint, and resumed."""
    where = ("--run.root", tmp_path, *SHORT, *further)
    done = solera("train", "--run.name", "whole", *where)
    assert done.returncode == 0, done.stderr
    checkpoints = tmp_path / "killed" / "checkpoints"
    with start("train", "--run.name", "killed", *where) as running:
        while not list(checkpoints.glob("step-*")):
            assert running.poll() is None
            time.sleep(0.01)
        running.kill()
    assert not (tmp_path / "killed" / "model").exists()
    done = solera("train", "--resume", tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    for name in ("killed", "whole"):
        assert (tmp_path / name / "model" / "model.safetensors").exists()
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    expected = torch.float32 if "--lora.rank" in further else torch.bfloat16  # float32 holds what LoRA adds
    assert {tensor.dtype for tensor in ours.values()} == {expected}


def test_the_engine_samples_with_the_learners_probabilities(tiny):
    """Weights that bfloat16 can hold. What differs from float64 is the rounding of the inputs of products."""
    with torch.no_grad():
        for p in tiny.parameters().values():
            p.copy_(p.bfloat16())
    model, asked = lean(tiny.copy(torch.float32)), ragged_requests(20, 3)
    completions = ask(InProcessEngine(model.sharing(), (END,), 64, torch.bfloat16), asked)
    learner, close, exact = make_learner(model, compute=torch.bfloat16, memory="lean"), [], []
    for (prompt, sampling, _), completion in zip(asked, completions, strict=True):
        learner.temperature = sampling.temperature
        rollout = Rollout("prompt", (Sequence.turns((prompt, completion)),))
        close.append(np.abs(learner.score([rollout]).logp_T - completion.behaviour_logp_T))
        exact.append(np.abs(fresh_logp(tiny, prompt, completion, sampling.temperature) - completion.behaviour_logp_T))
    assert np.concatenate(close).max() < 1e-2
    assert np.concatenate(close).mean() < 1e-4
    assert 1e-4 < np.concatenate(exact).mean() < 0.03


@pytest.mark.parametrize("period", [1, 5])
def test_engine_and_learner_share_one_copy_where_nothing_is_in_flight(tmp_path, period):
    """Of each trained tensor, the addresses that the learner, the engine and the examiner compute with."""
    config = Config(run=RunConfig(device="cpu"), learn=LearnConfig(memory="lean"), sync=SyncConfig(period=period))
    parts = load_parts(resolved(config))
    store = Ledger(tmp_path / "store.db")
    loop = build_loop(parts, store, sink=None, folder=tmp_path)
    models = [parts.model, loop.learner.model, loop.learner.compute_weights.model]
    for name, parameter in parts.model.parameters().items():
        assert parameter.dtype == torch.bfloat16
        assert {model.parameters()[name].data_ptr() for model in models} == {parameter.data_ptr()}
        own = loop.engine.model.parameters()[name]
        assert own.dtype == torch.bfloat16
        assert (own.data_ptr() == parameter.data_ptr()) == (period == 1)
    loop.supply.close()
    store.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--model.compute", "float32"), "model.compute is float32, but learn.memory = lean keeps all weights in "),
        (("--model.compute", "float16"), "model.compute is float16, but learn.memory = lean keeps all weights in "),
        (("--cluster.learners", "2"), "cluster.learners: ranks keep their weights in float32"),
        (("--objective.beta", "0.1", "--objective.ref_ema", "0.1"), "objective.ref_ema moves the reference by less "),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(tmp_path, given, says):
    done = solera("train", "--run.root", tmp_path, "--learn.memory", "lean", *given)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_run_keeps_its_memory_when_it_is_resumed(tmp_path):
    assert solera("train", "--run.root", tmp_path, "--run.name", "run", *SHORT, "--run.steps", "2").returncode == 0
    done = solera("train", "--resume", tmp_path / "run", "--run.steps", "4", "--learn.memory", "full")
    assert done.returncode == 2
    assert "learn.memory" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("memory", ["full", "lean"])
def test_an_edited_config_does_not_mix_the_two(tmp_path, memory):
    given = [memory if value == "lean" else value for value in SHORT]
    assert solera("train", "--run.root", tmp_path, "--run.name", "run", *given, "--run.steps", "2").returncode == 0
    file, other = tmp_path / "run" / "config.toml", {"full": "lean", "lean": "full"}[memory]
    text = file.read_text()
    assert f'memory = "{memory}"' in text
    file.write_text(text.replace(f'memory = "{memory}"', f'memory = "{other}"'))
    done = solera("train", "--resume", tmp_path / "run", "--run.steps", "4")
    assert done.returncode == 2
    said = done.stderr.strip().splitlines()[-1]
    assert f"learn.memory is {other}, but the checkpoint was written with {memory}: set it back" in said
    assert "Traceback" not in done.stderr


def test_a_model_that_mixes_types_in_its_own_way_is_refused():
    """GPT-2 multiplies with a layer of its own, of which both inputs must have the same type."""
    config = GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1)
    model = LanguageModel(GPT2LMHeadModel(config).eval())
    model.check()
    with pytest.raises(
        SoleraError, match=r"^learn.memory is lean, but GPT2LMHeadModel cannot be computed with bfloat16 weights"
    ):
        lean(model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_learns(name):
    """Three steps at a rate that moves every tensor."""
    torch.manual_seed(0)
    model = LanguageModel(with_capped_scores(ARCHITECTURES[name]().eval()))
    model.check()
    before = {key: p.detach().clone() for key, p in lean(model).parameters().items()}
    learner = make_learner(model, compute=torch.bfloat16, lr=1e-2, memory="lean")
    for step in range(3):
        learner.update(collate(make_groups(step), learner.objective, now=step, lineage="test", seed=0))
    for key, p in model.parameters().items():
        assert p.dtype == torch.bfloat16
        assert p.isfinite().all()
        assert not torch.equal(p, before[key]), key
    assert learner._optimiser.steps == 3


def test_the_gradient_is_that_of_the_same_weights_in_float64(tiny):
    """Weights that bfloat16 can hold, so both have the same. Products with 8-bit inputs and a gradient of 8 bits cost
    less than 2 % of the gradient."""
    with torch.no_grad():
        for p in tiny.parameters().values():
            p.copy_(p.bfloat16())
    exact = make_learner(tiny)
    batch = collate(make_groups(), exact.objective, now=0, lineage="test", seed=0)
    exact.update(batch)
    expected = torch.cat([p.grad.flatten() for p in tiny.parameters().values()])
    model = lean(tiny.copy(torch.float32))
    model.module.requires_grad_(True)
    learner, found = make_learner(model, compute=torch.bfloat16, memory="lean"), []
    scale = learner.compute_weights.loss_scale
    step = learner._optimiser.step

    def keep(rate, norm, scaled):
        assert scaled == scale == 2.0**15
        assert {p.grad.dtype for p in model.parameters().values()} == {torch.bfloat16}
        found.append(torch.cat([p.grad.double().flatten() for p in model.parameters().values()]) / scale)
        step(rate, norm, scaled)

    learner._optimiser.step = keep
    update = learner.update(batch)
    assert torch.linalg.norm(found[0] - expected) < 0.02 * torch.linalg.norm(expected)
    assert update.metrics["learn/grad_norm"] == pytest.approx(float(torch.linalg.norm(found[0])), rel=1e-5)


def test_a_token_that_occurs_often_has_its_whole_gradient(tiny):
    """1,000 times the same token, each with a gradient of 1: bfloat16 alone would stop at 256."""
    embedding = lean(tiny).module.get_input_embeddings()
    embedding(torch.full((1, 1000), 3)).sum().backward()
    assert set(embedding.weight.grad[3].tolist()) == {1000.0}
    assert not embedding.weight.grad[:3].any()


def test_a_gradient_that_is_not_finite_stops_the_run(tiny):
    learner = make_learner(lean(tiny), compute=torch.bfloat16, memory="lean")
    next(iter(tiny.parameters().values())).data.fill_(torch.inf)
    with pytest.raises(SoleraError, match=r"the gradient of batch 0 is not finite: lower learn\.lr$"):
        learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))


class Shapes(TorchDispatchMode):
    """The shapes of everything that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[tuple[int, ...]]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if "mm" in function.__name__:
            self.seen.add(tuple(made.shape))
        return made


@pytest.mark.parametrize("memory", ["full", "lean"])
def test_lora_multiplies_nothing_for_the_gradient_of_the_head(tiny, memory):
    """The head is [11, 32], and no product of an update returns that shape or its transpose. Without LoRA one does."""
    seen = {}
    for rank in (0, 4):
        model = LanguageModel(tiny.copy(torch.float32).module)
        model.module.requires_grad_(True)
        if rank:
            model = loading.with_adapter(model, LoraConfig(rank), "nowhere", seed=0)
        compute = torch.bfloat16 if memory == "lean" else torch.float32
        learner = make_learner(lean(model) if memory == "lean" else model, compute=compute, memory=memory)
        batch = collate(make_groups(), learner.objective, now=0, lineage="test", seed=0)
        with Shapes() as shapes:
            learner.update(batch)
        seen[rank] = bool(shapes.seen & {(11, 32), (32, 11)})
        assert not rank or (model.head.weight.grad is None and not model.head.weight.requires_grad)
    assert seen == {0: True, 4: False}


@pytest.mark.parametrize(("memory", "least", "most"), [("full", 16.0, 20.0), ("lean", 6.0, 8.0)])
def test_bytes_per_weight_through_a_whole_update(monkeypatch, memory, least, most):
    """A model whose weights outweigh its activations. By hand, on a CPU: float32 weights, gradients and two moments are
    16 bytes; `lean` has 2 + 2 + 2 and two float32 scales for 256 weights. Beside that there are activations, the
    chunk of an update, which is as small here as it is beside a real model, and one weight matrix at a time in float32,
    which a CPU multiplies with: the largest here is an eighth of the model, so half a byte for each weight."""
    monkeypatch.setattr(optimisers, "CHUNK", 1 << 14)
    config = LlamaConfig(
        vocab_size=11, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    compute = torch.bfloat16 if memory == "lean" else torch.float32
    with Counting() as counted:
        model = LanguageModel(LlamaForCausalLM(config).float().eval())
        learner = make_learner(lean(model) if memory == "lean" else model, compute=compute, memory=memory, lr=1e-3)
        count = sum(p.numel() for p in model.parameters().values())
        for step in range(2):
            counted.peak = counted.alive
            learner.update(collate(make_groups(step)[:1], learner.objective, now=step, lineage="test", seed=0))
    assert least < counted.peak / count < most


def test_weights_that_lie_together_are_saved_and_read_back(tiny, tmp_path):
    """A GPU lays out the weights of one input together. They are saved under their own names, without the attention
    that is ours."""
    model = lean(tiny)
    model.with_plans()
    siblings.join(model.body)
    model.module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.parameters().items():
        assert torch.equal(saved[name], parameter)
    assert "solera" not in (tmp_path / "config.json").read_text()
