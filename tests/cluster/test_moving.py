"""Weights and state move from two ranks to one process and on to three ranks; training goes on as if nothing was."""

import copy
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from solera.config import ObjectiveConfig
from solera.sharded.processes import Processes
from tests.cluster.ranks import begin, llama, spec_of, start
from tests.cluster.test_sharded import alone, batch_of
from tests.learner.test_invariance import make_groups

pytestmark = pytest.mark.cluster
OBJECTIVE = ObjectiveConfig("grpo", beta=0.05, ref_ema=0.5)


@pytest.fixture
def two_and_three() -> Iterator[tuple[Processes, Processes]]:
    two, three = start(2), start(3)
    yield two, three
    two.close()
    three.close()


def learn(learner, spec, steps: range) -> tuple[dict[str, torch.Tensor], dict]:
    for step in steps:
        learner.update(batch_of(make_groups(step), learner, spec))
    weights = {name: tensor.clone() for name, tensor in learner.weights("float64").tensors}
    return weights, copy.deepcopy(learner.state())


def test_two_ranks_then_one_process_then_three_ranks(two_and_three):
    two, three = two_and_three
    spec = spec_of(OBJECTIVE, lr=1e-3)
    expected, _ = learn(alone(spec), spec, range(6))
    weights, state = learn(begin(two, spec), spec, range(2))

    spec = spec_of(OBJECTIVE, partial(llama, state=weights), lr=1e-3)
    single = alone(spec)
    single.restore("test", 2, state)
    weights, state = learn(single, spec, range(2, 4))

    spec = spec_of(OBJECTIVE, partial(llama, state=weights), lr=1e-3)
    sharded = begin(three, spec)
    sharded.restore("test", 4, state)
    weights, _ = learn(sharded, spec, range(4, 6))
    assert sharded.manifest("float64").version == sharded.version == 6
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-9), name


def test_a_resumed_learner_goes_on_bit_for_bit(two_and_three):
    for ranks in two_and_three:
        spec = spec_of(OBJECTIVE, lr=1e-3)
        sharded = begin(ranks, spec)
        weights, state = learn(sharded, spec, range(2))
        expected, _ = learn(sharded, spec, range(2, 4))
        spec = spec_of(OBJECTIVE, partial(llama, state=weights), lr=1e-3)
        resumed = begin(ranks, spec)
        resumed.restore("test", 2, state)
        found, _ = learn(resumed, spec, range(2, 4))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
