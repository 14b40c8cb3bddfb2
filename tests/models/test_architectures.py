"""Engine and learner compute what transformers' own eager attention computes, for every architecture.

Eager attention is the reference because it has the windows, caps and norms of each architecture written out.
"""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from solera.models.language_model import LanguageModel, with_capped_scores
from solera.models.source import EMBEDDED
from tests.command import solera
from tests.engines.test_in_process import SAMPLING, InProcessEngine, ask, fresh_logp, ragged_requests
from tests.learner.test_invariance import assert_same, collate, formula_gradient, gradient, make_groups, make_learner
from tests.models.architectures import ARCHITECTURES, END, make

PACKED = {"llama", "llama, tied", "qwen2", "qwen3", "mistral", "phi", "qwen3_moe"}


@pytest.fixture(params=ARCHITECTURES)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name) -> LanguageModel:
    model = LanguageModel(with_capped_scores(make(name)))
    model.check()
    return model


@pytest.fixture
def eager(name) -> LanguageModel:
    module = make(name)
    module.set_attn_implementation("eager")
    return LanguageModel(module)


def called(model: LanguageModel) -> list[LanguageModel]:
    """The model as a CPU calls it and, if it can, as a GPU does."""
    if not model.can_take_plans:
        return [model]
    planned = LanguageModel(copy.deepcopy(model.module)).with_plans()
    return [model, planned]


def test_texts_are_packed_where_that_is_right(model, name):
    assert model.takes_any_mask == model.can_take_plans == (name in PACKED) == (not model.plain_because)


@pytest.mark.parametrize(("kind", "packed"), [("dynamic", False), ("linear", True)])
def test_a_model_whose_positions_depend_on_the_longest_text_is_not_packed(kind, packed):
    """A recorded step cannot ask how long the longest text is."""
    config = make("llama").config
    config.rope_parameters = {"rope_type": kind, "factor": 2.0, "rope_theta": 10_000.0}
    model = LanguageModel(LlamaForCausalLM(config).eval())
    model.check()
    assert model.takes_any_mask and model.can_take_plans == packed


def test_the_engine_samples_from_the_model(model, eager):
    for way in called(model):
        requests = ragged_requests(8, 3)
        engine = InProcessEngine(way, (END,), 64, model.module.dtype)
        for (prompt, *_), completion in zip(requests, ask(engine, requests), strict=True):
            expected = fresh_logp(eager, prompt, completion, SAMPLING.temperature)
            assert np.abs(completion.behaviour_logp_T - expected).max() < 1e-4


def test_the_learner_differentiates_the_model(model, eager):
    groups = make_groups()
    batch = collate(groups, make_learner(eager).objective, now=0, lineage="test", seed=0)
    expected = formula_gradient(eager, batch)
    assert torch.linalg.norm(expected) > 0.01
    for way in called(model):
        assert_same(gradient(way, groups), expected, 1e-6 if model.module.dtype == torch.float64 else 1e-4)


def test_a_model_that_cannot_be_packed_is_announced_and_trained(tmp_path):
    make("gemma2").save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(tmp_path / "model")
    small = ["--run.steps", 2, "--collect.prompts", 4, "--collect.group_size", 4, "--evaluate.problems", 8]
    done = solera("train", "--model", "model", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = "note: Gemma2ForCausalLM: it caps its attention scores, so texts are padded, not packed, which is slower"
    assert (done.stdout + done.stderr).count(said) == 1
