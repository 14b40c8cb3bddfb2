"""Gradients of a copy in lower precision are summed on the masters; the scale of a loss on its way through float16."""

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.learner.compute_weights import CALM, ComputeWeights
from solera.learner.learner import Learner
from solera.models.attention import PackedTexts, Text
from solera.models.language_model import LanguageModel
from solera.models.memory import _SET_ASIDE
from solera.protocols import Weights
from solera.training.collation import collate
from tests.learner.test_graphs import llama
from tests.learner.test_invariance import make_groups, make_learner


def test_a_scale_that_worked_stays_and_doubles_after_a_calm_while(tiny):
    weights = ComputeWeights(tiny.copy(torch.float32), torch.float32, trained=True)
    weights.loss_scale = weights._most_scale = 64.0
    seen = []
    for failed in [False, True, *[False] * (2 * CALM), True, *[False] * (3 * CALM)]:
        weights.keep_scale(weights.loss_scale / 16 if failed else weights.loss_scale)
        seen.append(weights.loss_scale)
    assert seen[:2] == [64, 4]
    assert seen[1 + CALM - 1 : 1 + CALM + 1] == [4, 8]
    assert seen[1 + 2 * CALM : 1 + 2 * CALM + 2] == [16, 1]
    assert seen[-1] == 8


def test_without_float16_the_scale_is_one(tiny):
    weights = ComputeWeights(tiny.copy(torch.float32), torch.float32, trained=True)
    for _ in range(3 * CALM):
        weights.keep_scale(weights.loss_scale)
    assert weights.loss_scale == 1


def test_it_never_grows_beyond_where_it_began(tiny):
    weights = ComputeWeights(tiny.copy(torch.float32), torch.float32, trained=True)
    weights.loss_scale = weights._most_scale = 4.0
    weights.keep_scale(1.0)
    for _ in range(9 * CALM):
        weights.keep_scale(weights.loss_scale)
    assert weights.loss_scale == 4


@pytest.mark.parametrize("kind", ["masters compute", "a copy computes"])
def test_scoring_as_an_earlier_version_gives_its_bits_and_leaves_no_trace(kind):
    """Expected: what that version scored, and the weights and the next update of a learner that never looked back."""
    learners = [make_learner(llama("tied"), lr=1e-2) for _ in range(2)]
    if kind == "a copy computes":
        for learner in learners:
            weights = learner.compute_weights
            weights.model = LanguageModel(copy.deepcopy(weights.masters.module)).with_plans()
            weights.separate, weights._to = True, list(weights.model.parameters().values())
    batch = collate(make_groups(), learners[0].objective, now=0, lineage="test", seed=0)
    looking = learners[0]
    sent = {name: tensor.clone() for name, tensor in looking.weights("torch.float64").tensors}
    manifest, before = looking.manifest("torch.float64"), looking.score(batch.rollouts).logp_T
    for learner in learners:
        learner.update(batch)
    assert not np.array_equal(looking.score(batch.rollouts).logp_T, before)
    scored, held = looking.score_as(Weights("test", 0, iter(sent.items())), batch.rollouts)
    assert np.array_equal(scored.logp_T, before)
    assert (held.version, sorted(held.tensors)) == (0, sorted(manifest.tensors))
    for learner in learners:
        learner.update(batch)
    one, other = (learner.model.parameters() for learner in learners)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_learner_has_the_scale_and_the_limits_of_the_one_before(tmp_path):
    """In a checkpoint of one process, of ranks, and of a version that did not write them."""
    learner, *resumed = (make_learner(llama("untied")) for _ in range(4))
    for each in (learner, *resumed):
        each.compute_weights._most_scale = 128.0  # as in float16
    weights = learner.compute_weights
    weights.keep_scale(64.0)
    weights.keep_scale(64.0)
    weights.take_at_most(123_456_789)
    learner._recomputes = True
    learner.save(tmp_path / "ranks")
    resumed[0].restore("test", 3, copy.deepcopy(learner.state()))
    resumed[1].restore("test", 3, tmp_path / "ranks")
    for other in resumed[:2]:
        assert other.compute_weights.state() == {"loss_scale": 64.0, "calm": 2, "at_once": 123_456_789}
        assert other._recomputes and other.state()["numbers"] == learner.state()["numbers"]
    before = resumed[2].state()["numbers"]
    resumed[2].restore("test", 3, {name: part for name, part in learner.state().items() if name != "numbers"})
    assert resumed[2].state()["numbers"] == before != learner.state()["numbers"]


def test_memory_that_the_first_update_takes_is_set_aside(tiny, monkeypatch):
    """Per weight: 4 bytes for a gradient and 8 for two moments. Gradients of the copy come and go: 2 bytes."""
    monkeypatch.setattr(type(tiny), "for_compute", type(tiny).copy)

    def taken(learner: Learner) -> tuple[float, float]:
        weights = sum(p.numel() for p in learner.model.parameters().values())
        return _SET_ASIDE[learner] / weights, learner.compute_weights._missing_gradients() / weights

    learner, resumed = (make_learner(tiny.copy(torch.float32), compute=torch.bfloat16) for _ in range(2))
    for each in (learner, resumed):
        for p in (*each.model.parameters().values(), *each.compute_weights.model.parameters().values()):
            p.requires_grad_()
    learner._set_aside()
    assert taken(learner) == (12, 2)
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    assert taken(learner) == (0, 2)
    resumed.restore("test", 1, copy.deepcopy(learner.state()))
    assert taken(resumed) == (4, 2)
    monkeypatch.undo()
    lean = make_learner(llama("wide"), memory="lean")
    assert _SET_ASIDE[lean] == 0


def test_gradients_of_the_copy_are_summed_on_the_masters_without_their_scale(tiny, monkeypatch):
    """By hand: the k-th parameter has a gradient of k, then of 2k, each times 8; one has the second only, one none."""
    monkeypatch.setattr(type(tiny), "for_compute", type(tiny).copy)
    masters = tiny.copy(torch.float32)
    weights = ComputeWeights(masters, torch.bfloat16, trained=True)
    own, kept = weights.model.parameters(), masters.parameters()
    assert weights.separate
    never, late = list(own)[:2]
    for times in (1, 2):
        for k, (name, parameter) in enumerate(own.items()):
            without = name == never or (name == late and times == 1)
            parameter.grad = None if without else torch.full_like(parameter, 8.0 * times * k)
        weights.pass_on_gradients(8.0)
        assert all(parameter.grad is None for parameter in own.values())
    assert kept[never].grad is None
    for k, (name, master) in enumerate(kept.items()):
        if name != never:
            assert master.grad.dtype == torch.float32
            assert torch.equal(master.grad, torch.full_like(master, (2.0 if name == late else 3.0) * k))


@pytest.mark.parametrize(("hidden", "inner", "layers"), [(64, 176, 6), (128, 256, 12), (64, 256, 24)])
def test_the_memory_of_activations_is_about_what_autograd_keeps(hidden, inner, layers):
    """Bytes of the tensors that autograd keeps, each once. While one layer is recomputed, its own come on top, once as
    activations and at most once as gradients."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LanguageModel(
        LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=layers, **sizes)).eval()
    ).with_plans()
    weights = ComputeWeights(model, torch.float32, trained=True)

    def kept() -> float:
        own = {parameter.untyped_storage().data_ptr() for parameter in model.module.parameters()}
        found = dict[int, int]()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids, at = torch.arange(512)[None] % 50, torch.arange(512)[None]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), weights.learning():
            model.hidden(ids, at, plan=PackedTexts.of([Text(0, 512)]))
        return sum(found.values()) / 512

    whole = kept()
    assert 0.8 < whole / weights.bytes_per_token(recomputes=False) < 1.05
    weights.recompute(True)
    least = kept() + whole / layers
    assert least < weights.bytes_per_token(recomputes=True) < least + 1.4 * whole / layers
