"""Weights and state move from two ranks to one process and on to three ranks; training goes on as if nothing was."""

import copy
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from solera.config import ObjectiveConfig
from solera.sharded.ranks import Ranks
from tests.cluster.ranks import begin, llama, spec_of, start
from tests.cluster.test_sharded import alone, batch_of
from tests.learner.test_invariance import make_groups

pytestmark = pytest.mark.cluster
OBJECTIVE = ObjectiveConfig("grpo", beta=0.05, ref_ema=0.5)


@pytest.fixture(scope="module")
def two_and_three() -> Iterator[tuple[Ranks, Ranks]]:
    two, three = start(2), start(3)
    yield two, three
    two.close()
    three.close()


def learn(learner, spec, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        learner.update(batch_of(make_groups(step), learner, spec))
    return {name: tensor.clone() for name, tensor in learner.weights("float64").tensors}


def resumed(learner, version: int, folder):
    learner.restore("test", version, folder)
    return learner


def test_two_ranks_then_one_process_then_three_ranks(two_and_three, tmp_path):
    two, three = two_and_three
    spec = spec_of(OBJECTIVE, lr=1e-3)
    expected = learn(alone(spec), spec, range(6))
    first = begin(two, spec)
    weights = learn(first, spec, range(2))
    first.save(tmp_path / "two")

    spec = spec_of(OBJECTIVE, partial(llama, state=weights), lr=1e-3)
    second = resumed(alone(spec), 2, tmp_path / "two")
    weights = learn(second, spec, range(2, 4))
    second.save(tmp_path / "one")

    for state in (tmp_path / "one", copy.deepcopy(second.state())):  # ranks also read what a single process writes
        spec = spec_of(OBJECTIVE, partial(llama, state=weights), lr=1e-3)
        third = resumed(begin(three, spec), 4, state)
        found = learn(third, spec, range(4, 6))
        assert third.manifest("float64").version == third.version == 6
        for name, tensor in found.items():
            assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-9), name


def test_a_resumed_learner_goes_on_bit_for_bit(two_and_three, tmp_path):
    for ranks in two_and_three:
        spec, folder = spec_of(OBJECTIVE, lr=1e-3), tmp_path / str(ranks.count)
        sharded = begin(ranks, spec)
        weights = learn(sharded, spec, range(2))
        sharded.save(folder)
        expected = learn(sharded, spec, range(2, 4))
        spec = spec_of(OBJECTIVE, partial(llama, state=weights), lr=1e-3)
        found = learn(resumed(begin(ranks, spec), 2, folder), spec, range(2, 4))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_state_before_the_first_step_can_be_saved(two_and_three, tmp_path):
    """Nothing was learned, so the optimiser has no moments yet."""
    two, three = two_and_three
    spec = spec_of(OBJECTIVE, lr=1e-3)
    expected = learn(alone(spec), spec, range(1))
    begin(two, spec).save(tmp_path / "two")
    found = learn(resumed(begin(three, spec), 0, tmp_path / "two"), spec, range(1))
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-9), name
