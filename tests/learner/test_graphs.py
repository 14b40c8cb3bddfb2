"""Passes in padded sizes through static memory give what plain passes give. What CUDA graphs record runs here one by
one; tests/test_gpu.py has the graphs themselves."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.config import LoraConfig, ObjectiveConfig
from solera.engines.fused import KNOWN
from solera.learner.graphs import FIRST_USES, Pass, RecordedBody
from solera.learner.learner import Learner
from solera.learner.portions import portions_of
from solera.learner.rows import flat_micro_batches, places_for, tiles_for
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.records import Completion, Rollout, Sequence
from solera.training.collation import collate
from tests.conftest import END, VOCABULARY
from tests.learner.test_invariance import GRPO, assert_same, make_groups, make_learner
from tests.models.architectures import ARCHITECTURES

MOST = 4160
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3, "eos_token_id": END,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def llama(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")).double().eval()
    model = LanguageModel(module)
    if kind == "lora":
        pytest.importorskip("peft")
        model = loading.with_adapter(model, LoraConfig(3, 6.0), "nowhere", seed=0)
    return model.in_bfloat16().with_plans() if kind == "wide" else model.with_plans()


def pads(learner: Learner, records: bool) -> Learner:
    weights = learner.compute_weights
    weights.padded = MOST
    weights._recorded = RecordedBody(weights.model, MOST) if records else None
    return learner


def learned(learner: Learner, updates: int) -> list[torch.Tensor]:
    """All weights after each update, each from another batch."""
    seen = []
    for number in range(updates):
        batch = collate(make_groups(number), learner.objective, now=number, lineage="test", seed=0)
        learner.update(batch)
        seen.append(torch.cat([p.detach().flatten() for p in learner.model.parameters().values()]).clone())
    return seen


@pytest.mark.parametrize("kind", ["untied", "tied", "wide", "lora"])
@pytest.mark.parametrize("learn", [{}, {"micro_batch_tokens": 100, "minibatches": 2, "passes": 2}], ids=str)
def test_replayed_updates_are_those_of_plain_passes(kind, learn):
    """To the bit if both are padded, else up to rounding. Weights move in between."""
    learn = {**learn, "lr": 1e-2, "memory": "lean" if kind == "wide" else "full"}
    objective = GRPO if kind == "lora" else dataclasses.replace(GRPO, entropy_bonus=0.05)
    recorded = pads(make_learner(llama(kind), objective, **learn), records=True)
    replayed = learned(recorded, FIRST_USES + 3)
    padded = learned(pads(make_learner(llama(kind), objective, **learn), records=False), FIRST_USES + 3)
    plain = learned(make_learner(llama(kind), objective, **learn), FIRST_USES + 3)
    assert list(recorded.compute_weights.recorded.passes) == [1088]
    assert not torch.equal(replayed[-1], replayed[-2])
    assert all(map(torch.equal, replayed, padded))
    if kind != "wide":  # stochastic rounding
        assert_same(replayed[-1], plain[-1])


def test_an_overflow_is_computed_again_and_leaves_nothing_behind():
    """The first scales give infinite gradients: float32 ends at 2¹²⁸."""
    learners = [pads(make_learner(llama("wide"), lr=1e-2, memory="lean"), records) for records in (True, False)]
    weights = []
    for learner in learners:
        learned(learner, FIRST_USES + 1)
        learner.compute_weights.loss_scale = 2.0**132
        weights += learned(learner, 1)
        assert 1 < learner.compute_weights.loss_scale < 2.0**130
    assert learners[0].compute_weights.recorded.passes
    assert torch.equal(*weights)


def test_recomputed_activations_are_not_replayed():
    learner = pads(make_learner(llama("tied"), gradient_checkpointing=True, lr=1e-2), records=True)
    learned(learner, FIRST_USES + 1)
    assert learner.compute_weights.recorded is None
    learner.compute_weights.recompute(False)
    assert not learner.compute_weights.recorded.passes


def rollouts_of(lengths: list[int]) -> tuple[Rollout, ...]:
    """Each with a prompt of its own, of two tokens."""
    rng = np.random.default_rng(0)
    return tuple(
        Rollout(
            f"prompt/{n}",
            (
                Sequence.turns(
                    (
                        (2 + n % 9, n // 9),
                        Completion(
                            rng.integers(2, VOCABULARY, length - 2).astype(np.int32),
                            np.zeros(length - 2, np.float32), ((length - 2, 0),), "stop",
                        ),
                    )
                ),
            ),
        )
        for n, length in enumerate(lengths)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "places"),
    [
        ([40, 30], 1088), ([544, 544], 1088), ([1000, 89], 2112), ([4000, 160], 4160), ([4000, 161], 4161),
        ([3] * 270, 1088), ([3] * 300, 900),  # 291 tiles, of which padding takes 5
    ],
    ids=str,
)  # fmt: skip
def test_padding_leaves_the_texts_as_they_are(lengths, places):
    """There is none if too many places or tiles would be needed."""
    rollouts = rollouts_of(lengths)
    (plain,) = flat_micro_batches(rollouts, 100_000)
    (micro,) = flat_micro_batches(rollouts, 100_000, MOST)
    tokens = sum(lengths)
    assert plain.token_RL.shape == (1, tokens) and micro.token_RL.shape == (1, places)
    assert micro.padded_places == (places if places != tokens or places in (1088, 4160) else None)
    for name in ("token_RL", "position_RL"):
        assert torch.equal(getattr(micro, name)[:, :tokens], getattr(plain, name))
        assert not getattr(micro, name)[:, tokens:].any()
    for name in ("predictor_T", "target_T", "behaviour_logp_T", "response_T"):
        assert torch.equal(getattr(micro, name), getattr(plain, name))
    ends = micro.texts.query_end
    assert torch.equal(ends[: len(plain.texts.query_end)], plain.texts.query_end) and ends[-1] == places
    if micro.padded_places:
        assert len(micro.texts.query_tiles) == len(micro.texts.key_tiles) == tiles_for(places)
        covered = sum(min(64, stop - first) for first, stop, *_ in micro.texts.query_tiles.tolist())
        assert covered == places


def test_a_text_above_the_budget_leaves_the_others_together():
    """13 texts of 600 tokens fit into 8,256."""
    first, *others = flat_micro_batches(rollouts_of([600] * 512 + [9100]), 8256)
    assert first.token_RL.shape == (1, 9100) and first.response_T.unique().tolist() == [512]
    assert len(others) == -(-512 // 13)
    assert max(micro.token_RL.numel() for micro in others) <= 8256
    assert sorted(number for micro in others for number in micro.response_T.unique().tolist()) == list(range(512))
    assert [micro.token_RL.numel() for micro in flat_micro_batches(rollouts_of([50, 40]), 30)] == [50, 40]


def test_a_size_is_no_width_of_a_model():
    sizes = {places_for(tokens) for tokens in range(1, 30_000)}
    assert len(sizes) == 16
    assert not sizes & {2**n * odd for n in range(7, 15) for odd in (1, 3, 5, 7)}
    assert all(tiles_for(size) % 2 for size in sizes)


def test_a_backward_pass_after_another_forward_pass_is_refused():
    recorded = RecordedBody(llama("tied"), MOST)
    (micro,) = flat_micro_batches(rollouts_of([40, 30]), 100, MOST)
    for _ in range(FIRST_USES + 1):
        assert recorded.hidden(micro) is None
        recorded.record([micro])
    first, second = recorded.hidden(micro), recorded.hidden(micro)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="another pass"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="another pass"):
        second.sum().backward()
    with torch.no_grad():
        alone = recorded.hidden(micro)
    assert torch.equal(alone, first) and not alone.requires_grad


@pytest.mark.parametrize("kind", ["untied", "wide", "lora"])
def test_what_is_only_scored_is_replayed_too(kind, monkeypatch):
    """Watched responses, and all of them before a first step between minibatches. The bits do not depend on it."""
    replayed, forward = list[int](), Pass.forward
    note = lambda one, given: replayed.append(given.shape[1]) or forward(one, given)  # noqa: E731
    monkeypatch.setattr(Pass, "forward", note)
    learn = {"lr": 1e-2, "minibatches": 2, "memory": "lean" if kind == "wide" else "full"}
    learners = [pads(make_learner(llama(kind), **learn), records) for records in (True, False)]
    for learner in learners:
        learner.compute_weights.loss_scale = 1.0  # no gradient overflows and is computed again
    for number in range(FIRST_USES + 2):
        batch = collate(make_groups(number), learners[0].objective, now=number, lineage="test", seed=0)
        assert batch.watched
        ours, plain = (learner.update(batch) for learner in learners)
        assert np.array_equal(ours.log_ratio_T, plain.log_ratio_T)
    assert replayed == [1088] * 5 * 2  # in two updates: two minibatches and the watched responses, then two steps


def test_a_reference_without_adapters_is_not_replayed_with_them(monkeypatch):
    """π_ref of a model with adapters is the same model without them. A graph would compute them all the same."""
    replayed, forward = list[bool](), Pass.forward
    note = lambda one, given: replayed.append(adapter.disable_adapters) or forward(one, given)  # noqa: E731
    monkeypatch.setattr(Pass, "forward", note)
    learner = pads(make_learner(llama("lora"), dataclasses.replace(GRPO, beta=0.1), lr=1e-2), records=True)
    adapter = learner.model.attentions[0].q_proj
    learned(learner, FIRST_USES + 2)
    assert replayed == [False] * 2 * 2  # in two updates: watched responses, and those that are learned from


def test_watched_responses_share_a_pass_that_waits_for_the_host(monkeypatch):
    """A layer has 32 · 32 · 2 + 32 · 16 · 2 weights in attention, 3 · 32 · 48 in its gates and 2 · 32 in its norms."""
    learner, most = make_learner(llama("untied")), int(1.2e11 / 7744)
    assert learner.compute_weights.scores_apart(1)  # a CPU never waits
    learner.model.device = torch.device("cuda")
    assert [learner.compute_weights.scores_apart(tokens) for tokens in (1, most, most + 1)] == [False, False, True]
    learner.model.device = torch.device("cpu")
    monkeypatch.setattr(type(learner.compute_weights), "scores_apart", lambda self, tokens: tokens < 0)
    batch = collate(make_groups(), learner.objective, now=0, lineage="test", seed=0)
    (portion,) = portions_of(batch, learner.objective, 1, 10, ranks=1)[0]
    (micro,) = learner._cut_portion(portion)
    assert batch.watched and len(micro.response_T.unique()) == len(batch.rollouts) + len(batch.watched)


@pytest.mark.parametrize(
    ("padded", "recomputes", "expected"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_plain_pass_without_a_gradient_runs_the_code_of_recorded_ones(padded, recomputes, expected):
    """What torch compiles without a gradient may differ in the last bits. Not if activations would be kept for long."""
    learner = make_learner(llama("untied"), gradient_checkpointing=recomputes)
    if padded:
        pads(learner, records=False)
    seen = list[tuple[bool, bool]]()
    note = lambda layer, given, out: seen.append((torch.is_grad_enabled(), layer.training))  # noqa: E731
    learner.compute_weights.model.body.layers[0].register_forward_hook(note)
    (micro,) = learner._cut(rollouts_of([40, 30]))
    with torch.no_grad():
        (logp_T,) = learner._score_all(learner.compute_weights, [micro])
    assert seen == [(expected, False)] and not logp_T.requires_grad


def test_no_autograd_graph_outlives_its_update(tiny):
    """A recording would meet its leaves. A leaf's node carries a mark while anything keeps it alive."""
    parameter = tiny.module.model.layers[0].mlp.up_proj.weight

    @torch.enable_grad()
    def marks() -> dict[str, bool]:
        return parameter.view_as(parameter).grad_fn.next_functions[0][0].metadata

    def mark(*_: object) -> None:
        seen.append("mark" in marks())
        marks().update(mark=True)

    seen = list[bool]()
    tiny.module.model.norm.register_forward_hook(mark)
    learner = make_learner(tiny, ObjectiveConfig("grpo"), micro_batch_tokens=40, passes=2)
    kept = learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    assert any(seen)  # the graph of one micro-batch is alive while the next one is computed
    assert "mark" not in marks() and kept.metrics


@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("wide", [False, True])
def test_hidden_states_of_embedded_tokens_are_those_of_tokens(name, wide):
    torch.manual_seed(0)
    model = LanguageModel(ARCHITECTURES[name]().eval())
    assert type(model.body.layers[0]).__name__ in KNOWN
    if wide:
        model.in_bfloat16()
    model.with_plans()
    (micro,) = flat_micro_batches(rollouts_of([40, 30]), 100, MOST)
    with torch.no_grad():
        expected = model.hidden(micro.token_RL, micro.position_RL, plan=micro.texts)
        got = model.hidden_of(model.embed(micro.token_RL), micro.position_RL, micro.texts)
    assert torch.equal(got, expected)
