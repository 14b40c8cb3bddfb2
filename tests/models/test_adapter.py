"""LoRA: its gradient, its sync, its reference, its folders, and a run with it that is stopped and resumed."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import torch

from solera.config import LoraConfig, ObjectiveConfig, parse
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.learner.compute_weights import ComputeWeights
from solera.learner.reference import Reference
from solera.models import loading
from solera.models.adapter import MARK, Adapter
from solera.models.language_model import LanguageModel
from solera.models.merging import merge
from solera.models.source import EMBEDDED
from solera.objectives.table import resolve
from solera.records import Sampling
from solera.run import running
from solera.run.parts import resolved
from solera.training.collation import collate
from tests.conftest import END
from tests.learner.test_invariance import make_groups, make_learner
from tests.test_resume import assert_same_outcome

RANK, ALPHA = 3, 6.0
SCALE = ALPHA / RANK
RUN = """
run = {{ root = "{root}", name = "{name}", steps = 6, device = "cpu" }}
lora = {{ rank = 4, export = "{export}" }}
collect = {{ prompts = 6, group_size = 6 }}
sync = {{ period = 2 }}
objective = {{ beta = 0.02 }}
learn = {{ lr = 1e-3 }}
evaluate = {{ every = 3, problems = 20 }}
checkpoint = {{ every = 2, keep = 9 }}
report = {{ tensorboard = false, progress = false, page = false }}
"""


def config(root, name, export="merged"):
    return parse(RUN.format(root=root, name=name, export=export), "test")


@pytest.fixture
def adapted(tiny) -> LanguageModel:
    """The tiny model with adapters that do something."""
    model = loading.with_adapter(tiny, LoraConfig(RANK, ALPHA), "nowhere", seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def layer_names(model: LanguageModel) -> list[str]:
    return sorted({name.split(f".{MARK}")[0] for name in model.parameters()})


def test_fresh_adapters_change_nothing_and_are_all_that_is_trained(tiny):
    ids = torch.arange(2, 8)[None]
    before = tiny.module(input_ids=ids).logits
    model = loading.with_adapter(tiny, LoraConfig(RANK, ALPHA), "nowhere", seed=0)
    assert torch.equal(model.module(input_ids=ids).logits, before)
    assert len(model.parameters()) == 2 * 2 * 7  # A and B; two layers of four projections and three linear maps
    assert {name for name, p in model.module.named_parameters() if p.requires_grad} == set(model.parameters())


def test_the_gradient_is_the_merged_models_by_the_chain_rule(adapted):
    merged = LanguageModel(adapted.adapter.merged().requires_grad_(True))
    groups = make_groups()
    for model in (adapted, merged):
        learner = make_learner(model, grad_clip=1e9)
        learner.update(collate(groups, learner.objective, now=0, lineage="test", seed=0))
    full, low = merged.parameters(), adapted.parameters()
    for name in layer_names(adapted):
        a, b = low[f"{name}.lora_A.default.weight"], low[f"{name}.lora_B.default.weight"]
        gradient = full[f"{name}.weight"].grad
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(a.grad, SCALE * b.T.detach() @ gradient, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(b.grad, SCALE * gradient @ a.T.detach(), rtol=1e-6, atol=1e-9)


def test_merging_adds_the_product_and_leaves_the_model_as_it_was(adapted):
    ids = torch.arange(2, 8)[None]
    logits = adapted.module(input_ids=ids).logits
    merged, low = dict(adapted.adapter.merged().named_parameters()), adapted.parameters()
    base = dict(adapted.module.named_parameters())
    for name in layer_names(adapted):
        product = low[f"{name}.lora_B.default.weight"] @ low[f"{name}.lora_A.default.weight"]
        torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.base_layer.weight"] + SCALE * product)
    assert torch.equal(adapted.module(input_ids=ids).logits, logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_server_that_has_no_peft_merges_to_the_same_weights(adapted, dtype):
    """The model is float64; merging is in float32."""
    base = adapted.adapter.base(dtype)
    ours = merge(base, {name: p.detach().to(dtype) for name, p in adapted.parameters().items()})
    theirs = dict(adapted.adapter.merged().named_parameters())
    assert ours.keys() == theirs.keys() == base.tensors.keys()
    for name, tensor in ours.items():
        exact = {torch.float64: 1e-6, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(tensor.double(), theirs[name].double(), rtol=exact, atol=exact)
        assert tensor.dtype == dtype


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_modules": ["lm_head"]}, "lm_head"),  # it shares its weights with the embedding
        ({"target_modules": ["embed_tokens"]}, "model.embed_tokens"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "model.layers.0.self_attn.q_proj"),
    ],
    ids=["tied head", "embedding", "DoRA"],
)
def test_adapters_that_a_server_cannot_add_are_refused_by_name(tiny, settings, named):
    import peft

    tiny.module.config.tie_word_embeddings = True
    tiny.module.tie_weights()
    adapter = Adapter(peft.get_peft_model(tiny.module, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)))
    with pytest.raises(SoleraError, match=f"lora.targets: the adapters of {named} cannot be sent to a server"):
        adapter.base(torch.float32)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_scale_is_that_of_the_adapters(tiny, rslora):
    """alpha / rank, and alpha / √rank if rank-stabilised (arXiv 2312.03732)."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["up_proj"], task_type="CAUSAL_LM", use_rslora=rslora)
    scale = Adapter(peft.get_peft_model(tiny.module, config)).base(torch.float32).scale
    assert scale == {f"model.layers.{layer}.mlp.up_proj": 3.0 if rslora else 1.5 for layer in range(2)}


def test_the_reference_is_the_adapter_switched_off(tiny):
    plain = tiny.copy(torch.float64)
    model = loading.with_adapter(tiny, LoraConfig(RANK, ALPHA), "nowhere", seed=0)
    reference = Reference(model, None, None)
    with torch.no_grad():
        for parameter in model.parameters().values():
            parameter.add_(0.2)
    ids, at = torch.arange(2, 8)[None], torch.arange(6)[None]
    with reference.scoring(ComputeWeights(model, torch.float64, trained=True)) as weights, torch.no_grad():
        scored = weights.model
        assert torch.equal(scored.logits(scored.hidden(ids, at)), plain.logits(plain.hidden(ids, at)))
    assert not torch.allclose(model.logits(model.hidden(ids, at)), plain.logits(plain.hidden(ids, at)))
    assert all(parameter.requires_grad for parameter in model.parameters().values())
    assert reference.state() == {}


def test_the_synced_adapter_gives_the_engine_the_learners_probabilities(tiny):
    model = loading.with_adapter(tiny, LoraConfig(RANK, ALPHA), "nowhere", seed=0)
    engine = InProcessEngine(model.copy(torch.float64), (END,), 8, torch.float64)
    learner = make_learner(model, objective=resolve(ObjectiveConfig("reinforce")), lr=0.05)
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    weights = learner.weights(engine.dtype)
    named = learner.manifest(engine.dtype).tensors
    assert [spec.name for spec in named] == list(model.parameters())
    assert all(MARK in spec.name for spec in named)
    prompt = (3, 5, 7)

    def error() -> float:
        completion = asyncio.run(engine.generate(prompt, Sampling(1.0, 8), seed=3))
        ids = torch.tensor([[*prompt, *completion.token_ids_T.tolist()]])
        logp = model.module(input_ids=ids).logits.log_softmax(-1)[0, 2:-1]
        taken = logp.gather(1, ids[0, 3:, None])[:, 0].detach().numpy()
        return float(np.abs(taken - completion.behaviour_logp_T).max())

    assert error() > 1e-2  # the engine's adapters are still the first ones
    engine.load(weights)
    assert error() < 1e-5


def test_a_run_leaves_adapters_in_its_checkpoints_and_a_merged_model(tmp_path):
    folder = running.train(config(tmp_path, "merged")).folder
    checkpoint = folder / "checkpoints" / "step-000006"
    assert not (checkpoint / "model" / "config.json").exists()
    assert (
        json.loads((checkpoint / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == "embedded"
    )
    assert (checkpoint / "model" / "adapter_model.safetensors").stat().st_size < 0.5 * (
        EMBEDDED / "model.safetensors"
    ).stat().st_size
    tensors = torch.load(checkpoint / "tensors.pt", weights_only=True)
    assert all(MARK in name for name in tensors["engine"])
    ids = torch.arange(2, 8)[None]
    whole, _ = loading.load(str(folder / "model"), torch.device("cpu"))
    parts, _ = loading.load(str(checkpoint / "model"), torch.device("cpu"))
    assert whole.adapter is None and parts.adapter is not None
    assert torch.allclose(whole.module(input_ids=ids).logits, parts.module(input_ids=ids).logits, atol=1e-4)
    base, _ = loading.load("embedded", torch.device("cpu"))
    assert not torch.allclose(base.module(input_ids=ids).logits, parts.module(input_ids=ids).logits, atol=1e-3)


@pytest.mark.parametrize("objective", ["beta = 0.02", "beta = 0.02, ref_ema = 0.3"])
def test_stopped_and_resumed_it_ends_bit_for_bit_the_same(tmp_path, monkeypatch, objective):
    text = RUN.replace("beta = 0.02", objective)
    whole = running.train(parse(text.format(root=tmp_path, name="whole", export="adapter"), "test")).folder
    stopped = parse(text.format(root=tmp_path, name="stopped", export="adapter"), "test")
    asked = iter([False, False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(running.Interruption, "wanted", lambda self: next(asked))
        with pytest.raises(running.InterruptedRunError):
            running.train(stopped)
    running.resume(tmp_path / "stopped")
    assert_same_outcome(whole, tmp_path / "stopped")


def test_mistakes_are_said_in_one_line(tiny, adapted, tmp_path):
    with pytest.raises(SoleraError, match="holds adapters only"):
        loading.with_adapter(adapted, LoraConfig(RANK, ALPHA), "x", 0)
    with pytest.raises(SoleraError, match=r"lora\.targets: "):
        loading.with_adapter(tiny, LoraConfig(RANK, ALPHA, ("no_such_layer",)), "x", 0)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SoleraError, match="does not name its base model"):
        loading.load(str(tmp_path), torch.device("cpu"))
    with pytest.raises(SoleraError, match=r"have no effect without lora\.rank above 0"):
        resolved(dataclasses.replace(config(tmp_path, "x"), lora=LoraConfig(0, 8.0)))
