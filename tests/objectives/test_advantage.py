"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch

from solera.config import AdvantageName
from solera.objectives.advantage import ADVANTAGES, mean, whiten, zero_variance

REWARD_B = torch.tensor([1.0, 0.0, 5.0, 0.0, 0.0, 5.0], dtype=torch.float64)
GROUP_B = torch.tensor([0, 0, 1, 0, 0, 1])  # group 0: 1 0 0 0, group 1: 5 5


def test_mean_subtracts_the_groups_own_mean():
    assert mean(REWARD_B, GROUP_B, 2).tolist() == [0.75, -0.25, 0.0, -0.25, -0.25, 0.0]


def test_whiten_divides_by_the_population_deviation():
    # Group 0: mean 1/4, variance (9/16 + 3/16)/4 = 3/16.
    deviation = math.sqrt(3 / 16 + 1e-4)
    expected = [0.75 / deviation, -0.25 / deviation, 0.0, -0.25 / deviation, -0.25 / deviation, 0.0]
    assert whiten(REWARD_B, GROUP_B, 2).tolist() == pytest.approx(expected, abs=1e-15)


def test_a_group_of_one_has_no_advantage():
    lone = torch.tensor([3.0], dtype=torch.float64), torch.tensor([0]), 1
    assert mean(*lone).item() == whiten(*lone).item() == 0.0


def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_the_order_of_rows():
    generator = torch.Generator().manual_seed(0)
    reward_B = torch.rand(40, generator=generator, dtype=torch.float64)
    group_B = torch.randint(0, 7, (40,), generator=generator)
    order = torch.randperm(40, generator=generator)
    for advantage in ADVANTAGES.values():
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
