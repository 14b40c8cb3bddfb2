"""The improvement J(π) − J(π_k), from α's point of view. (FORMULAS, section 9; Mroueh et al., Theorem 1)

Population figures take every response of a prompt: `alpha_B` its probability under the behaviour policy, `w_B` and
`proximal_w_B` the ratios π/α and π_k/α, `reward_B` in [0, 1].
"""

import torch
from torch import Tensor

from solera.objectives.advantage import WHITEN_EPSILON, group_mean


def deviation(alpha_B: Tensor, reward_B: Tensor) -> Tensor:
    """`σ = √(Var_α r + ε)`"""
    mean = (alpha_B * reward_B).sum()
    return ((alpha_B * (reward_B - mean).square()).sum() + WHITEN_EPSILON).sqrt()


def surrogate(alpha_B: Tensor, w_B: Tensor, reward_B: Tensor) -> Tensor:
    """`L_α(π) = E_α[w·(r−μ)/σ]`"""
    return (alpha_B * w_B * (reward_B - (alpha_B * reward_B).sum())).sum() / deviation(alpha_B, reward_B)


def identity(alpha_B: Tensor, w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor) -> Tensor:
    """`J(π) − J(π_k) = E_α[(w_π − w_{π_k})·(r − μ)]`, exactly where α covers both."""
    return (alpha_B * (w_B - proximal_w_B) * (reward_B - (alpha_B * reward_B).sum())).sum()


def lower_bound(alpha_B: Tensor, w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor, factor: float) -> Tensor:
    """`L_α(π) − factor·(1−σ)/σ·TV(π, α) − factor·TV(π_k, α)`: factor 2 is Theorem 1, factor 1 the tight bound."""
    sigma = deviation(alpha_B, reward_B)
    tv, proximal_tv = ((alpha_B * (1 - w).clamp_min(0)).sum() for w in (w_B, proximal_w_B))
    return surrogate(alpha_B, w_B, reward_B) - factor * ((1 - sigma) / sigma * tv + proximal_tv)


def group_estimates(w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`G/(G−1) · mean[(w_π − w_{π_k})·(r − mean(r))]` of each group of two or more. `[B] -> [P]`

    Unbiased for J(π) − J(π_k). The group's own mean stands for μ and takes a share 1/G of each reward
    with it: hence the factor.
    """
    size_P = torch.bincount(group_B, minlength=groups)
    assert bool((size_P >= 2).all()), "a group of one has no baseline"
    part_B = (w_B - proximal_w_B) * (reward_B - group_mean(reward_B, group_B, groups))
    return part_B.new_zeros(groups).index_add(0, group_B, part_B) / (size_P - 1)
