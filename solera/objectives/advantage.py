"""Advantages: how much better a response is than the others of its group.

`reward_B` holds one reward a response, `group_B` the number of its group (0 … groups−1), in any order. Arithmetic is
float64; the results are constant in the policy's parameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-4

Advantage = Callable[[Tensor, Tensor, int], Tensor]


def group_mean(value_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Mean over each group, standing on every member. `[B], [B] -> [B]`"""
    total_P = value_B.new_zeros(groups).index_add(0, group_B, value_B)
    size_P = torch.bincount(group_B, minlength=groups)
    return (total_P / size_P)[group_B]


def mean(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`A_i = r_i − mean(r)` over the group. (Yao et al., section 2)"""
    _check(reward_B, group_B)
    return reward_B - group_mean(reward_B, group_B, groups)


def whiten(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`A_i = (r_i − mean(r)) / √(var(r) + ε)`, var divided by the group's size, ε = 1e-4. (Mroueh et al.)"""
    centred_B = mean(reward_B, group_B, groups)
    return centred_B / (group_mean(centred_B.square(), group_B, groups) + WHITEN_EPSILON).sqrt()


def zero_variance(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Which groups have all rewards exactly equal. A computed variance would miss some by rounding. `[B] -> [P]`"""
    _check(reward_B, group_B)
    low_P = reward_B.new_full((groups,), torch.inf).scatter_reduce(0, group_B, reward_B, "amin")
    high_P = reward_B.new_full((groups,), -torch.inf).scatter_reduce(0, group_B, reward_B, "amax")
    return low_P >= high_P


def _check(reward_B: Tensor, group_B: Tensor) -> None:
    assert reward_B.dtype == torch.float64 and reward_B.ndim == 1, "rewards are a float64 vector"
    assert group_B.dtype == torch.int64 and group_B.shape == reward_B.shape, "one group number a reward"


ADVANTAGES: dict[str, Advantage] = {"mean": mean, "whiten": whiten}
