"""The improvement J(π) − J(π_k), estimated on α's responses. (docs/formulas.md, section 9; Mroueh et al., Theorem 1)

Population figures take every response of a prompt: `alpha_B` is its probability under the behaviour policy, `w_B` and
`proximal_w_B` are the ratios π/α and π_k/α, and `reward_B` is in [0, 1].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from solera.diagnosis.student import two_sided_quantile
from solera.diagnosis.verdict import INCONCLUSIVE, state
from solera.objectives.advantage import group_mean, group_sum

EPSILON = 1e-4
"""ε of σ = √(Var + ε). It keeps the bounds finite if all rewards are equal. Advantages use `whiten_epsilon` instead."""
STRAYS = 3.0
"""Number of standard errors by which the mean of w may differ from 1 by chance."""
NEGLIGIBLE = 0.05
"""A difference from 1 that is always accepted: it is too small to change a verdict."""


def deviation(alpha_B: Tensor, reward_B: Tensor) -> Tensor:
    """`σ = √(Var_α r + ε)`"""
    mean = (alpha_B * reward_B).sum()
    return ((alpha_B * (reward_B - mean).square()).sum() + EPSILON).sqrt()


def surrogate(alpha_B: Tensor, w_B: Tensor, reward_B: Tensor) -> Tensor:
    """`L_α(π) = E_α[w·(r−μ)/σ]`"""
    return (alpha_B * w_B * (reward_B - (alpha_B * reward_B).sum())).sum() / deviation(alpha_B, reward_B)


def identity(alpha_B: Tensor, w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor) -> Tensor:
    """`J(π) − J(π_k) = E_α[(w_π − w_{π_k})·(r − μ)]`. Exact if α covers both policies."""
    return (alpha_B * (w_B - proximal_w_B) * (reward_B - (alpha_B * reward_B).sum())).sum()


def lower_bound(alpha_B: Tensor, w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor, factor: float) -> Tensor:
    """`L_α(π) − factor·(1−σ)/σ·TV(π, α) − factor·TV(π_k, α)`. Factor 2: Theorem 1. Factor 1: the tight bound."""
    sigma = deviation(alpha_B, reward_B)
    tv, proximal_tv = ((alpha_B * (1 - w).clamp_min(0)).sum() for w in (w_B, proximal_w_B))
    return surrogate(alpha_B, w_B, reward_B) - factor * ((1 - sigma) / sigma * tv + proximal_tv)


def group_estimates(w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """`G/(G−1) · mean[(w_π − w_{π_k})·(r − mean(r))]` of each group of two or more. `[B] -> [P]`

    Unbiased for J(π) − J(π_k). The group's own mean replaces μ and contains 1/G of each reward; the factor corrects
    for this.
    """
    size_P = torch.bincount(group_B, minlength=groups)
    assert bool((size_P >= 2).all()), "a group of one has no baseline"
    part_B = (w_B - proximal_w_B) * (reward_B - group_mean(reward_B, group_B, groups))
    return group_sum(part_B, group_B, groups) / (size_P - 1)


@dataclass(frozen=True)
class Improvement:
    """The improvement over P prompts of a probe, and numbers that show whether the probe covers π.

    `interval` is the 95 % interval of `gain`. A single prompt has none.
    """

    gain: float
    interval: tuple[float, float] | None
    tight: float | None
    theorem1: float | None
    mean_w: float
    mean_w_error: float | None

    def metrics(self) -> dict[str, float]:
        """`improvement/…`, without entries that have no value."""
        found = {
            "estimate": self.gain, "low": None, "high": None, "tight": self.tight, "theorem1": self.theorem1,
            "mean_w": self.mean_w, "state": INCONCLUSIVE,
        }  # fmt: skip
        if self.interval is not None:
            low, high = self.interval
            found |= {"low": low, "high": high, "state": state(low, high) if self.covered else INCONCLUSIVE}
        return {f"improvement/{name}": value for name, value in found.items() if value is not None}

    @property
    def covered(self) -> bool:
        """Whether the mean of w is 1 within its error. If not, α rarely writes what π writes."""
        error = self.mean_w_error
        return error is None or abs(self.mean_w - 1) <= max(STRAYS * error, NEGLIGIBLE)


def estimate_improvement(w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor, group_B: Tensor) -> Improvement | None:
    """Estimate the improvement on groups that α wrote and that were never trained on. `[B]` each, float64. Groups of
    one are left out.

    The bounds use one σ for all prompts, from their pooled variance. The bound, averaged over prompts, holds for any σ
    in (0, 1], and one σ is estimated more precisely than many. There are no bounds if a reward is outside [0, 1].
    """
    size_P = torch.bincount(group_B)
    kept_B = (size_P >= 2)[group_B]
    if not kept_B.any():
        return None
    w_B, proximal_w_B, reward_B = w_B[kept_B], proximal_w_B[kept_B], reward_B[kept_B]
    group_B = torch.unique(group_B[kept_B], return_inverse=True)[1]
    groups = int(group_B.max()) + 1
    gain_P = group_estimates(w_B, proximal_w_B, reward_B, group_B, groups)
    mean_w, mean_w_error = _mean_and_error(_by_group(w_B, group_B, groups))
    tight = theorem1 = None
    if reward_B.min() >= 0 and reward_B.max() <= 1:
        tight, theorem1 = (_pooled_bound(w_B, proximal_w_B, reward_B, group_B, groups, factor) for factor in (1, 2))
    return Improvement(gain_P.mean().item(), interval_of_mean(gain_P), tight, theorem1, mean_w, mean_w_error)


def interval_of_mean(value_P: Tensor) -> tuple[float, float] | None:
    """A 95 % interval for the mean over all prompts, of which the probe has P. `None` for a single one.

    Often a few prompts make up most of a change, and a probe may have missed one of them. So the upper end is that of
    Student's t interval with one more prompt, as good as the best of the probe, and the lower end that with one more,
    as bad as the worst. A prompt that does not change is always possible: the first gains at least 0, the second at
    most 0.
    """
    if len(value_P) < 2:
        return None
    t = two_sided_quantile(len(value_P))
    ends = []
    for extreme, sign in ((value_P.min().clamp(max=0), -1), (value_P.max().clamp(min=0), 1)):
        mean, error = _mean_and_error(torch.cat([value_P, extreme[None]]))
        assert error is not None
        ends.append(mean + sign * t * error)
    return ends[0], ends[1]


def _pooled_bound(
    w_B: Tensor, proximal_w_B: Tensor, reward_B: Tensor, group_B: Tensor, groups: int, factor: float
) -> float:
    """`lower_bound` from samples: `(J(π)−J(α))/σ − factor·(1−σ)/σ·TV(π, α) − factor·TV(π_k, α)`, means over prompts."""
    beyond_alpha = group_estimates(w_B, torch.ones_like(w_B), reward_B, group_B, groups).mean().item()
    variance_P = group_estimates(reward_B, torch.zeros_like(w_B), reward_B, group_B, groups)
    sigma = math.sqrt(variance_P.mean().item() + EPSILON)
    tv, proximal_tv = (_by_group((1 - w).clamp_min(0), group_B, groups).mean().item() for w in (w_B, proximal_w_B))
    return beyond_alpha / sigma - factor * ((1 - sigma) / sigma * tv + proximal_tv)


def _by_group(value_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Mean over the members of each group. `[B] -> [P]`"""
    size_P = torch.bincount(group_B, minlength=groups)
    return group_sum(value_B, group_B, groups) / size_P


def _mean_and_error(value_P: Tensor) -> tuple[float, float | None]:
    count = len(value_P)
    return value_P.mean().item(), value_P.std().item() / math.sqrt(count) if count > 1 else None
