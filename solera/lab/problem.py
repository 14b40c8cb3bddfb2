"""One prompt whose responses can be enumerated, and an objective's gradient on groups of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from solera.diagnosis.exact import Groups, Space, space_of, token_logp, token_slope
from solera.objectives.objective import Objective
from solera.objectives.padded import padded_loss

Track = Callable[[Iterable, str], Iterable]
"""Iterates and shows progress."""

COPIES = 20
EPSILON = 1e-4
"""ε of σ = √(p(1−p) + ε) at success rates near 0 and 1. With a smaller ε, fixed points could not be represented."""
WRONG_ARM = ((0.3, 0.6, 0.1), (0.0, 0.8, 1.0))
"""Probabilities under α and rewards of a bandit on which unclipped REINFORCE prefers the worse arm 2.
(docs/formulas.md, section 10, item 5)"""


@dataclass(frozen=True)
class Data:
    """Every response with its reward and its log-probabilities under α and under the reference."""

    space: Space
    reward_B: Tensor
    behaviour_logp_BT: Tensor
    ref_logp_BT: Tensor


def written_by(space: Space, reward_B: Tensor, behaviour_logits_SV: Tensor) -> Data:
    """Responses written by α, with α as the reference too."""
    logp_BT = token_logp(space, behaviour_logits_SV)
    return Data(space, reward_B, logp_BT, logp_BT)


def bandit(probability: Iterable[float], reward: Iterable[float]) -> tuple[Space, Tensor, Tensor]:
    """A bandit with the given probabilities and rewards: `(space, logits_SV, reward_B)`. Arm 1 is response 0."""
    logits_SV = torch.tensor([list(probability)], dtype=torch.float64).log()
    return space_of(logits_SV.shape[1], 1), logits_SV, torch.tensor(list(reward), dtype=torch.float64)


def pull(objective: Objective, data: Data, logits_SV: Tensor, member_NG: Tensor, uniform_NG: Tensor) -> Tensor:
    """`−∂loss/∂logp` of every token in a batch of N groups, before the first update (π_k = π). `[N, G, T]`"""
    row_B = member_NG.flatten()
    logp_BT = token_logp(data.space, logits_SV).detach()[row_B].requires_grad_()
    loss, _ = padded_loss(
        objective,
        logp_BT=logp_BT,
        mask_BT=data.space.mask_BT[row_B],
        reward_B=data.reward_B[row_B],
        group_B=torch.arange(len(member_NG)).repeat_interleave(member_NG.shape[1]),
        behaviour_logp_BT=data.behaviour_logp_BT[row_B],
        proximal_logp_BT=logp_BT.detach(),
        ref_logp_BT=data.ref_logp_BT[row_B],
        uniform_B=uniform_NG.flatten(),
        limit=logp_BT.shape[1],
    )
    return -torch.autograd.grad(loss, logp_BT)[0].view(*member_NG.shape, -1)


def ways(data: Data, logits_SV: Tensor, member_NG: Tensor, pull_NGT: Tensor) -> Tensor:
    """Each group's contribution to the batch's `−∇loss` in the logits. `[N, S, V]`"""
    count, tokens = data.space.mask_BT.shape
    place_NG = torch.arange(len(member_NG))[:, None] * count + member_NG
    pull_NBT = pull_NGT.new_zeros(len(member_NG) * count, tokens)
    pull_NBT.index_add_(0, place_NG.flatten(), pull_NGT.flatten(0, 1))
    return torch.tensordot(pull_NBT.view(-1, count, tokens), token_slope(data.space, logits_SV), dims=2)


def ascent(objective: Objective, data: Data, logits_SV: Tensor, member_G: Tensor, uniform_G: Tensor) -> Tensor:
    """`−∇loss` of a batch of one group: the direction of the update. `[S, V]`"""
    pull_NGT = pull(objective, data, logits_SV, member_G[None], uniform_G[None])
    return ways(data, logits_SV, member_G[None], pull_NGT)[0]


@dataclass(frozen=True)
class GradientEstimate:
    """Mean and total variance of one group's contribution to the gradient of a large batch."""

    mean_SV: Tensor
    variance: float

    @property
    def silent(self) -> bool:
        """Whether the mean is 0 up to rounding, so that it has no direction."""
        return self.mean_SV.norm().item() < 1e-12

    @property
    def noise(self) -> float | None:
        """Standard deviation of one group's contribution, divided by the length of the mean."""
        return None if self.silent else self.variance**0.5 / self.mean_SV.norm().item()


def estimate(
    objective: Objective,
    data: Data,
    logits_SV: Tensor,
    groups: Groups,
    generator: torch.Generator,
    copies: int = COPIES,
) -> GradientEstimate:
    """`E[−∇loss]` and the variance of one group's contribution.

    The batch holds every group at least once, and about in proportion to its weight. Each contribution is then weighted
    exactly. Only quantities of the whole batch (denominators, the statistics of m2po and adaptive T) are approximate;
    they get more accurate with more `copies` per group.
    """
    total = copies * len(groups.weight_M) if groups.exact else len(groups.weight_M)
    copies_M = (groups.weight_M * total).round().clamp_min(1).long()
    member_NG = groups.member_MG.repeat_interleave(copies_M, 0)
    weight_N = (groups.weight_M / copies_M).repeat_interleave(copies_M)
    uniform_NG = torch.rand(member_NG.shape, dtype=torch.float64, generator=generator)
    pull_NGT = pull(objective, data, logits_SV, member_NG, uniform_NG) * len(member_NG)
    way_NSV = ways(data, logits_SV, member_NG, pull_NGT)
    mean_SV = torch.tensordot(weight_N, way_NSV, dims=1)
    return GradientEstimate(mean_SV, (weight_N * (way_NSV - mean_SV).square().sum((1, 2))).sum().item())


def in_proportion(probability_B: Tensor, size: int) -> Tensor:
    """A group of `size` responses in proportion to their probabilities, by largest remainders. `[B] -> [G]`"""
    exact_B = (probability_B * size).round(decimals=9)
    count_B = exact_B.floor()
    missing = size - int(count_B.sum())
    count_B[(exact_B - count_B).argsort(descending=True, stable=True)[:missing]] += 1
    return torch.arange(len(probability_B)).repeat_interleave(count_B.long())


def cosine(a: Tensor, b: Tensor) -> float:
    return ((a * b).sum() / (a.norm() * b.norm())).item()
