"""Oracle 5: unclipped REINFORCE on α's data moves at a speed that θ has no part in, to the wrong arm."""

import math

import pytest
import torch

from solera.lab.fixed_point import walk
from solera.lab.objectives import named
from solera.lab.problem import WRONG_ARM, ascent, bandit, in_proportion, written_by

# α·(r − μ), μ = .6·.8 + .1·1 = .58
SPEED = [0.3 * (0 - 0.58), 0.6 * (0.8 - 0.58), 0.1 * (1 - 0.58)]


@pytest.mark.parametrize("seed", range(4))
def test_the_speed_does_not_depend_on_the_policy(seed: int):
    space, behaviour_SV, reward_B = bandit(*WRONG_ARM)
    member_G = in_proportion(torch.tensor(WRONG_ARM[0], dtype=torch.float64), 10)
    policy_SV = torch.randn(1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    data = written_by(space, reward_B, behaviour_SV)
    way_SV = ascent(named("reinforce"), data, policy_SV, member_G, torch.zeros(10, dtype=torch.float64))
    assert way_SV[0].tolist() == pytest.approx(SPEED, abs=1e-12)
    assert way_SV[0].tolist() == pytest.approx([-0.174, 0.132, 0.042])


def test_unclipped_reinforce_ends_at_the_wrong_arm():
    walked = walk(named("reinforce"), updates=200, period=None, seed=0)
    # Logits grow linearly: after 200 steps arm 2 leads arm 3 by log 6 + 200·(.132 − .042).
    end = walked.probability_NB[-1]
    assert end[1] / end[2] == pytest.approx(6 * math.exp(200 * 0.09), rel=1e-6)
    assert end[1] > 0.999
    assert walked.last_way_V == pytest.approx(SPEED, abs=1e-12)


def test_importance_weights_or_fresh_data_find_the_better_arm():
    """With ρ the update is ∇J of the policy itself; with fresh data ρ is near 1."""
    assert walk(named("reinforce", weight="importance"), updates=500, period=None, seed=0).probability_NB[-1][2] > 0.9
    assert walk(named("reinforce"), updates=500, period=20, seed=0).probability_NB[-1][2] > 0.9


@pytest.mark.parametrize("name", ["rec_twoside_nois", "rec_oneside_nois", "rec_oneside_is", "dr_grpo"])
def test_a_clip_stops_where_both_good_arms_reach_its_edge(name: str):
    """At 1.2·α for arms 2 and 3, and a last step beyond it; nothing holds arm 1, which is left with the rest."""
    walked = walk(named(name), updates=200, period=None, seed=0)
    low, middle, high = walked.probability_NB[-1]
    assert 0.72 < middle < 0.74
    assert 0.12 < high < 0.126
    assert low == pytest.approx(1 - middle - high)
    assert walked.last_way_V == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("name", ["opmd_kimi", "opmd_pairwise"])
def test_mirror_descent_ends_at_the_tilted_reference(name: str):
    """π_ref·exp(r/τ)/Z with π_ref = α and τ = 1: both regressions are solved there."""
    tilted = [a * math.exp(r) for a, r in zip(*WRONG_ARM, strict=True)]
    wanted = [value / sum(tilted) for value in tilted]
    assert walk(named(name), updates=300, period=None, seed=0).probability_NB[-1] == pytest.approx(wanted, abs=1e-3)
