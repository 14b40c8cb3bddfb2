"""What only an accelerator can show. Run with `pytest -m gpu`; the results are in benchmarks/RESULTS.md."""

import asyncio

import numpy as np
import pytest
import torch

from solera.engines.in_process import InProcessEngine
from solera.learner.batch import collate
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.records import Sampling
from tests.engines.test_in_process import ask, fresh_logp, ragged_requests
from tests.learner.test_invariance import assert_same, gradient, make_groups, make_learner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
END = 1


def on_gpu(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    copy = model.copy(dtype)
    return LanguageModel(copy.module.to("cuda"))


def test_behaviour_logp_in_float32_is_that_of_a_fresh_forward_pass(tiny):
    engine = InProcessEngine(on_gpu(tiny, torch.float32), (END,), 64, torch.float32)
    cpu = tiny.copy(torch.float32)
    requests = ragged_requests(30, 6)
    for (prompt, sampling, _), completion in zip(requests, ask(engine, requests), strict=True):
        assert (
            np.abs(completion.behaviour_logp_T - fresh_logp(cpu, prompt, completion, sampling.temperature)).max() < 1e-4
        )


def test_behaviour_logp_in_bfloat16_is_close(tiny):
    engine = InProcessEngine(on_gpu(tiny, torch.bfloat16), (END,), 64, torch.bfloat16)
    cpu = tiny.copy(torch.bfloat16).copy(torch.float32)
    differences = []
    requests = ragged_requests(60, 6)
    for (prompt, sampling, _), completion in zip(requests, ask(engine, requests), strict=True):
        differences += list(completion.behaviour_logp_T - fresh_logp(cpu, prompt, completion, sampling.temperature))
    assert np.abs(differences).mean() < 0.02


@pytest.mark.parametrize("cut", [{}, {"pack_tokens": 0}, {"micro_batch_tokens": 30}, {"logit_chunk": 3}], ids=str)
def test_the_gradient_is_that_of_the_cpu(tiny, cut):
    expected = gradient(tiny, make_groups())
    moved = LanguageModel(tiny.copy(torch.float64).module.to("cuda").requires_grad_(True))
    assert_same(gradient(moved, make_groups(), **cut).cpu(), expected)


def test_autocast_keeps_float32_weights_and_a_gradient_of_the_right_direction(tiny):
    expected = gradient(tiny, make_groups()).float()
    moved = LanguageModel(tiny.copy(torch.float32).module.to("cuda").requires_grad_(True))
    learner = make_learner(moved)
    learner.compute = torch.bfloat16
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    got = torch.cat([p.grad.flatten() for p in moved.parameters().values()])
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got.cpu(), expected, dim=0) > 0.98


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_training_on_the_gpu_learns(short_run, compute):
    result = short_run(
        f'run = {{ steps = 100, device = "cuda" }}\nmodel = {{ compute = "{compute}" }}\n'
        "collect = { prompts = 32 }\nevaluate = { problems = 200 }"
    )
    assert result.accuracy_after > 0.8
    at_age_0 = [
        row["divergence/tv_token"]
        for row in result.metrics[:100]
        if row["age/max"] == 0 and "divergence/tv_token" in row
    ]
    assert max(at_age_0) < (1e-5 if compute == "float32" else 0.05)  # what is left at age 0 is the engine's own error


def test_the_engine_shares_the_gpu_with_the_learner_without_touching_it():
    model, codec = loading.load("embedded", torch.device("cuda"))
    engine = InProcessEngine(model, codec.end_token_ids, 64, torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in model.parameters().items()}
    asyncio.run(engine.generate(codec.encode("3+4="), Sampling(1.0, 4), 0))
    for name, parameter in model.parameters().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])
