"""Engine and learner on a GPU compute what transformers' eager attention computes on a CPU, for every architecture."""

import copy

import numpy as np
import pytest
import torch

from solera.engines.in_process import InProcessEngine
from solera.models.language_model import LanguageModel, with_capped_scores
from solera.training.collation import collate
from tests.engines.test_in_process import SAMPLING, ask, fresh_logp, ragged_requests
from tests.learner.test_invariance import formula_gradient, make_groups, make_learner
from tests.models.architectures import ARCHITECTURES, END, make
from tests.models.test_architectures import PACKED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
WAYS = [
    (name, compute)
    for name in ARCHITECTURES
    for compute in (torch.float16, torch.bfloat16, torch.float32)
    if compute != torch.float16 or name in PACKED - {"qwen3_moe"}  # refused for the others
]
EVERY_WAY = pytest.mark.parametrize(("name", "compute"), WAYS, ids=str)


def rounded(name: str) -> torch.nn.Module:
    """Its weights are numbers that float16 and bfloat16 can hold, so computing in them rounds no weight."""
    module = make(name)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().half().float()
    return module.float()


@pytest.fixture
def model(name) -> LanguageModel:
    model = LanguageModel(with_capped_scores(rounded(name)).to("cuda"))
    model.check()
    assert model.can_take_plans == (name in PACKED), model.plain_because
    return model


@pytest.fixture
def eager(name) -> LanguageModel:
    module = rounded(name)
    module.set_attn_implementation("eager")
    return LanguageModel(module)


@EVERY_WAY
def test_the_engine_samples_from_the_model(model, eager, name, compute):
    requests = ragged_requests(24, 6)
    engine = InProcessEngine(model.for_compute(compute, copied=True), (END,), 64, compute, compiled=True)
    plain = LanguageModel(copy.deepcopy(eager.module).to(compute))
    errors, unavoidable = [], []
    for (prompt, *_), completion in zip(requests, ask(engine, requests), strict=True):
        expected = fresh_logp(eager, prompt, completion, SAMPLING.temperature)
        errors += np.abs(completion.behaviour_logp_T - expected).tolist()
        unavoidable += np.abs(fresh_logp(plain, prompt, completion, SAMPLING.temperature) - expected).tolist()
    print(f"{name}, {compute}: {np.mean(errors):.5f}; plain {np.mean(unavoidable):.5f}")
    assert np.mean(errors) < (1e-4 if compute == torch.float32 else 1.5 * np.mean(unavoidable))


@EVERY_WAY
def test_the_learner_differentiates_the_model(model, eager, name, compute):
    groups = make_groups()
    learner = make_learner(model, compute=compute, compiled=True)
    assert learner.compute_weights.model.takes_plans == (name in PACKED and compute != torch.float32)
    batch = collate(groups, learner.objective, now=0, lineage="test", seed=0)
    expected = formula_gradient(eager, batch)
    learner.update(batch)
    got = torch.cat([p.grad.flatten() for p in model.parameters().values()]).cpu()
    error = float((got - expected).norm() / expected.norm())
    print(f"{name}, {compute}: {error:.5f}")
    assert error < {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}[compute]
