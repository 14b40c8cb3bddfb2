"""Advantages against numbers worked out by hand."""

import math
from functools import partial

import pytest
import torch

from solera.config import AdvantageName, ObjectiveConfig
from solera.objectives.advantage import (
    ADVANTAGES,
    leave_one_out,
    logavgexp,
    mean,
    raw,
    red_drop,
    shifted,
    whiten,
    whiten_bessel,
    zero_variance,
)
from solera.objectives.objective import compose
from solera.objectives.table import resolve

REWARD_B = torch.tensor([1.0, 0.0, 5.0, 0.0, 0.0, 5.0], dtype=torch.float64)
GROUP_B = torch.tensor([0, 0, 1, 0, 0, 1])  # group 0: 1 0 0 0, group 1: 5 5


def test_mean_subtracts_the_groups_own_mean():
    assert mean(REWARD_B, GROUP_B, 2).tolist() == [0.75, -0.25, 0.0, -0.25, -0.25, 0.0]


def test_whiten_divides_by_the_population_deviation():
    # Group 0: mean 1/4, variance (9/16 + 3/16)/4 = 3/16.
    for epsilon in (1e-8, 1e-4, 1 / 16):
        deviation = math.sqrt(3 / 16 + epsilon)
        expected = [0.75 / deviation, -0.25 / deviation, 0.0, -0.25 / deviation, -0.25 / deviation, 0.0]
        found = whiten(REWARD_B, GROUP_B, 2, whiten_epsilon=epsilon)
        assert found.tolist() == pytest.approx(expected, abs=1e-15)


def test_whitened_rewards_have_no_scale():
    # Three of eight are right: mean 3/8, variance 15/64, so that A = (5/8)/√(15/64) = 5/√15 of a right answer.
    reward_B = torch.tensor([1.0] * 3 + [0.0] * 5, dtype=torch.float64)
    group_B = torch.zeros(8, dtype=torch.int64)
    advantage = compose(resolve(ObjectiveConfig("grpo"))).advantage
    for scale in (1.0, 0.01, 1000.0):
        assert advantage(scale * reward_B, group_B, 1)[0].item() == pytest.approx(5 / math.sqrt(15), rel=3e-4)
    # With 1e-4 the standard deviation has a floor of 0.01: 0.00625/√(0.0001·15/64 + 0.0001) = 0.625/√(79/64).
    floored = compose(resolve(ObjectiveConfig("grpo", whiten_epsilon=1e-4))).advantage
    assert floored(0.01 * reward_B, group_B, 1)[0].item() == pytest.approx(0.625 / math.sqrt(79 / 64))


def test_equal_rewards_have_no_advantage_whatever_their_mean_is_rounded_to():
    for epsilon in (1e-12, 1e-8):
        for value in (0.1, 0.7, 1 / 3, 123.4):
            reward_B = torch.full((7,), value, dtype=torch.float64)
            found = whiten(reward_B, torch.zeros(7, dtype=torch.int64), 1, whiten_epsilon=epsilon)
            assert found.abs().max() < 1e-6


def test_the_other_baselines():
    # Group 0: variance over G−1 is (9/16 + 3/16)/3 = 1/4, the mean of the others 0 or 1/3.
    assert whiten_bessel(REWARD_B, GROUP_B, 2)[:2].tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001])
    assert leave_one_out(REWARD_B, GROUP_B, 2).tolist() == pytest.approx([1.0, -1 / 3, 0.0, -1 / 3, -1 / 3, 0.0])
    soft = 0.5 * math.log((math.exp(2.0) + 3) / 4)
    expected = [1 - soft, -soft, 0.0, -soft, -soft, 0.0]
    assert logavgexp(REWARD_B, GROUP_B, 2, advantage_tau=0.5).tolist() == pytest.approx(expected)
    assert shifted(REWARD_B, GROUP_B, 2, delta=-0.1).tolist() == pytest.approx([0.85, -0.15, 0.1, -0.15, -0.15, 0.1])
    assert raw(REWARD_B, GROUP_B, 2).tolist() == REWARD_B.tolist()
    huge = torch.tensor([1e4, -1e4], dtype=torch.float64)
    soft = logavgexp(huge, torch.tensor([0, 0]), 1, advantage_tau=1.0)
    assert soft.tolist() == pytest.approx([math.log(2), -2e4 + math.log(2)])


def test_a_group_of_one_has_no_advantage_where_the_baseline_is_its_own():
    lone = torch.tensor([3.0], dtype=torch.float64), torch.tensor([0]), 1
    for advantage in (mean, partial(whiten, whiten_epsilon=1e-8), whiten_bessel, leave_one_out):
        assert advantage(*lone).item() == 0.0
    assert logavgexp(*lone, advantage_tau=0.7).item() == pytest.approx(0.0, abs=1e-15)
    assert shifted(*lone, delta=-0.1).item() == pytest.approx(0.1)
    assert raw(*lone).item() == 3.0


def test_red_drop_leaves_as_many_negatives_as_positives():
    # Group 0: mean 0.4, positives 0.9 and 0.8, negatives 0.1 0.2 0.0; group 1: one of each; group 2: all equal.
    reward_B = torch.tensor([0.9, 0.1, 0.2, 1.0, 0.8, 0.0, 0.0, 0.3, 0.3, 0.3], dtype=torch.float64)
    group_B = torch.tensor([0, 0, 0, 1, 0, 0, 1, 2, 2, 2])
    uniform_B = torch.tensor([0.0, 0.5, 0.1, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0])
    dropped = red_drop(reward_B, group_B, 3, uniform_B, worst=False)
    assert dropped.nonzero().flatten().tolist() == [2]  # the smallest number among group 0's negatives
    dropped = red_drop(reward_B, group_B, 3, uniform_B, worst=True)
    assert dropped.nonzero().flatten().tolist() == [5]  # its lowest reward
    tied = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    dropped = red_drop(tied, torch.zeros(5, dtype=torch.int64), 1, torch.tensor([0.0, 0.9, 0.3, 0.2, 0.6]), worst=True)
    assert dropped.nonzero().flatten().tolist() == [2, 3, 4]  # ties go by their numbers


def test_red_drop_keeps_equal_rewards_that_lie_below_their_rounded_mean():
    reward_B = torch.full((3,), 0.1, dtype=torch.float64)
    for value in (0.1, 0.7, 1 / 3):
        for size in range(1, 40):
            reward_B = torch.full((size,), value, dtype=torch.float64)
            group_B = torch.zeros(size, dtype=torch.int64)
            assert not red_drop(reward_B, group_B, 1, torch.rand(size), worst=False).any()


def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_the_order_of_rows():
    generator = torch.Generator().manual_seed(0)
    reward_B = torch.rand(40, generator=generator, dtype=torch.float64)
    group_B = torch.randint(0, 7, (40,), generator=generator)
    order = torch.randperm(40, generator=generator)
    for advantage in (mean, partial(whiten, whiten_epsilon=1e-8), whiten_bessel, leave_one_out):
        advantage_B = advantage(reward_B, group_B, 7)
        for p in range(7):
            assert abs(advantage_B[group_B == p].sum().item()) < 1e-12
        shuffled = advantage(reward_B[order], group_B[order], 7)
        assert torch.allclose(shuffled, advantage_B[order], atol=1e-12)


def test_zero_variance_means_exactly_equal():
    # 0.1 three times: a computed variance is 1.9e-34, not 0. The second group differs in the last bit.
    reward_B = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, math.nextafter(0.1, 1)], dtype=torch.float64)
    assert zero_variance(reward_B, torch.tensor([0, 0, 0, 1, 1, 1]), 2).tolist() == [True, False]


def test_every_name_of_the_config_has_a_function():
    assert set(ADVANTAGES) == set(AdvantageName.__args__)
