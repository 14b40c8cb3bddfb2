"""Advantages: how much better a response is than the others of its group. (docs/formulas.md, section 1)

`reward_B` holds one reward per response and `group_B` the index of its group (0 … groups−1), in any order. Arithmetic
is float64. The results are constant in the policy's parameters. Keyword-only parameters are config fields.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from solera.objectives.ratio import sum_by

BESSEL_EPSILON = 1e-4
"""What TRL adds to the standard deviation."""

Advantage = Callable[[Tensor, Tensor, int], Tensor]


def group_sum(value_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Sum over each group. `[B], [B] -> [P]`"""
    return sum_by(group_B, value_B, groups)


def group_size(group_B: Tensor, groups: int) -> Tensor:
    """Size of each response's group. `[B] -> [B]`"""
    return torch.bincount(group_B, minlength=groups)[group_B]


def group_mean(value_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Mean over each response's group. `[B], [B] -> [B]`"""
    return group_sum(value_B, group_B, groups)[group_B] / group_size(group_B, groups)


def group_logmeanexp(value_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`log mean exp(x)` over each response's group. `[B], [B] -> [B]`"""
    high_B = value_B.new_full((groups,), -torch.inf).scatter_reduce(0, group_B, value_B, "amax")[group_B]
    return high_B + group_mean((value_B - high_B).exp(), group_B, groups).log()


def raw(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`A_i = r_i`"""
    _check(reward_B, group_B)
    return reward_B.clone()


def mean(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`A_i = r_i − mean(r)` over the group. (Yao et al., section 2)"""
    _check(reward_B, group_B)
    return reward_B - group_mean(reward_B, group_B, groups)


def whiten(reward_B: Tensor, group_B: Tensor, groups: int, *, whiten_epsilon: float) -> Tensor:
    """`A_i = (r_i − mean(r)) / √(var(r) + ε)`, with var divided by G. (Mroueh et al.)"""
    centred_B = mean(reward_B, group_B, groups)
    return centred_B / (group_mean(centred_B.square(), group_B, groups) + whiten_epsilon).sqrt()


def whiten_bessel(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`A_i = (r_i − mean(r)) / (std(r) + 1e-4)`, with var divided by G−1, as in TRL. 0 in a group of one."""
    centred_B = mean(reward_B, group_B, groups)
    others_B = (group_size(group_B, groups) - 1).clamp_min(1)
    var_B = group_sum(centred_B.square(), group_B, groups)[group_B] / others_B
    return centred_B / (var_B.sqrt() + BESSEL_EPSILON)


def leave_one_out(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`A_i = G/(G−1)·(r_i − mean(r))`: the baseline is the mean of the others. 0 in a group of one."""
    size_B = group_size(group_B, groups)
    return mean(reward_B, group_B, groups) * size_B / (size_B - 1).clamp_min(1)


def logavgexp(reward_B: Tensor, group_B: Tensor, groups: int, *, advantage_tau: float) -> Tensor:
    """`A_i = r_i − τ·log mean exp(r/τ)`"""
    _check(reward_B, group_B)
    return reward_B - advantage_tau * group_logmeanexp(reward_B / advantage_tau, group_B, groups)


def shifted(reward_B: Tensor, group_B: Tensor, groups: int, *, delta: float) -> Tensor:
    """`A_i = r_i − (mean(r) + δ)`; δ < 0 leans towards imitation. (AsymRE)"""
    return mean(reward_B, group_B, groups) - delta


def zero_variance(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Which groups have exactly equal rewards. A computed variance could miss some because of rounding. `[B] -> [P]`"""
    _check(reward_B, group_B)
    low_P, high_P = _extremes(reward_B, group_B, groups)
    return low_P >= high_P


def red_drop(reward_B: Tensor, group_B: Tensor, groups: int, uniform_B: Tensor, *, worst: bool) -> Tensor:
    """Which responses RED-Drop removes: negatives (r < mean), until no group has more negatives than positives.

    It removes those with the smallest uniform numbers. With `worst`, it removes the lowest rewards first and uses the
    numbers to break ties.
    """
    assert uniform_B.shape == reward_B.shape, "one uniform number per response"
    high_P = _extremes(reward_B, group_B, groups)[1]
    # A rounded mean may exceed the best reward; then every response would count as a negative.
    baseline_B = torch.minimum(group_mean(reward_B, group_B, groups), high_P[group_B])
    negative_B = reward_B < baseline_B
    surplus_P = group_sum(2.0 * negative_B.double() - 1.0, group_B, groups).clamp_min(0)
    order = torch.argsort(uniform_B, stable=True)
    for key_B in ([reward_B] if worst else []) + [(~negative_B).long(), group_B]:  # the last key is the primary one
        order = order[torch.argsort(key_B[order], stable=True)]
    size_P = torch.bincount(group_B, minlength=groups)
    first_P = size_P.cumsum(0) - size_P
    rank_B = torch.empty_like(order)
    rank_B[order] = torch.arange(len(order), device=order.device)
    return rank_B - first_P[group_B] < surplus_P[group_B]


def _extremes(reward_B: Tensor, group_B: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    low_P = reward_B.new_full((groups,), torch.inf).scatter_reduce(0, group_B, reward_B, "amin")
    high_P = reward_B.new_full((groups,), -torch.inf).scatter_reduce(0, group_B, reward_B, "amax")
    return low_P, high_P


def _check(reward_B: Tensor, group_B: Tensor) -> None:
    assert reward_B.dtype == torch.float64 and reward_B.ndim == 1, "rewards are a float64 vector"
    assert group_B.dtype == torch.int64 and group_B.shape == reward_B.shape, "one group index per reward"


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "mean": mean,
    "whiten": whiten,
    "whiten_bessel": whiten_bessel,
    "leave_one_out": leave_one_out,
    "logavgexp": logavgexp,
    "shifted": shifted,
    "raw": raw,
}
