"""One prompt whose responses can all be written down, and what an objective does with groups of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from solera.diagnosis.exact import Groups, Space, space_of, token_logp, token_slope
from solera.objectives.objective import Objective
from solera.objectives.padded import padded_loss

Track = Callable[[Iterable, str], Iterable]
"""Goes through an iterable, and shows how far it is."""

COPIES = 20
EPSILON = 1e-4
"""ε of σ = √(p(1−p) + ε) where the lab looks at success rates near 0 and 1: with less, fixed points have no digits."""
WRONG_ARM = ((0.3, 0.6, 0.1), (0.0, 0.8, 1.0))
"""α's probabilities and the rewards of the bandit on which unclipped REINFORCE prefers arm 2. (FORMULAS, oracle 5)"""


@dataclass(frozen=True)
class Data:
    """Every response with its reward, and what its writer α and the reference say of it."""

    space: Space
    reward_B: Tensor
    behaviour_logp_BT: Tensor
    ref_logp_BT: Tensor


def written_by(space: Space, reward_B: Tensor, behaviour_logits_SV: Tensor) -> Data:
    """α's responses, with α as the reference too."""
    logp_BT = token_logp(space, behaviour_logits_SV)
    return Data(space, reward_B, logp_BT, logp_BT)


def bandit(probability: Iterable[float], reward: Iterable[float]) -> tuple[Space, Tensor, Tensor]:
    """Arms of given probabilities and rewards: `(space, logits_SV, reward_B)`. Arm 1 is response 0."""
    logits_SV = torch.tensor([list(probability)], dtype=torch.float64).log()
    return space_of(logits_SV.shape[1], 1), logits_SV, torch.tensor(list(reward), dtype=torch.float64)


def pull(objective: Objective, data: Data, logits_SV: Tensor, member_NG: Tensor, uniform_NG: Tensor) -> Tensor:
    """`−∂loss/∂logp` of every token of a batch of N groups, before its first update: π_k is π. `[N, G, T]`"""
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
    """Each group's part of a batch's `−∇loss`, in the logits. `[N, S, V]`"""
    count, tokens = data.space.mask_BT.shape
    place_NG = torch.arange(len(member_NG))[:, None] * count + member_NG
    pull_NBT = pull_NGT.new_zeros(len(member_NG) * count, tokens)
    pull_NBT.index_add_(0, place_NG.flatten(), pull_NGT.flatten(0, 1))
    return torch.tensordot(pull_NBT.view(-1, count, tokens), token_slope(data.space, logits_SV), dims=2)


def ascent(objective: Objective, data: Data, logits_SV: Tensor, member_G: Tensor, uniform_G: Tensor) -> Tensor:
    """`−∇loss` of a batch of one group: the way an update goes. `[S, V]`"""
    pull_NGT = pull(objective, data, logits_SV, member_G[None], uniform_G[None])
    return ways(data, logits_SV, member_G[None], pull_NGT)[0]


@dataclass(frozen=True)
class Estimate:
    """Mean and total variance of what a group adds to a large batch's gradient."""

    mean_SV: Tensor
    variance: float

    @property
    def silent(self) -> bool:
        """Whether the mean is 0, to rounding: it then has no direction."""
        return self.mean_SV.norm().item() < 1e-12

    @property
    def noise(self) -> float | None:
        """Standard deviation of one group's part over the length of the mean."""
        return None if self.silent else self.variance**0.5 / self.mean_SV.norm().item()


def estimate(
    objective: Objective,
    data: Data,
    logits_SV: Tensor,
    groups: Groups,
    generator: torch.Generator,
    copies: int = COPIES,
) -> Estimate:
    """`E[−∇loss]` and the variance of a group's part in it, in a batch of all groups, as often as their weights say.

    Each is there at least once and its part is weighed exactly; so only what spans a batch (denominators, the
    statistics of m2po and adaptive T) is a little off, the less the more `copies` a group has on average.
    """
    total = copies * len(groups.weight_M) if groups.exact else len(groups.weight_M)
    copies_M = (groups.weight_M * total).round().clamp_min(1).long()
    member_NG = groups.member_MG.repeat_interleave(copies_M, 0)
    weight_N = (groups.weight_M / copies_M).repeat_interleave(copies_M)
    uniform_NG = torch.rand(member_NG.shape, dtype=torch.float64, generator=generator)
    pull_NGT = pull(objective, data, logits_SV, member_NG, uniform_NG) * len(member_NG)
    way_NSV = ways(data, logits_SV, member_NG, pull_NGT)
    mean_SV = torch.tensordot(weight_N, way_NSV, dims=1)
    return Estimate(mean_SV, (weight_N * (way_NSV - mean_SV).square().sum((1, 2))).sum().item())


def in_proportion(probability_B: Tensor, size: int) -> Tensor:
    """A group of `size` responses, each as often as its probability says, largest remainders first. `[B] -> [G]`"""
    exact_B = (probability_B * size).round(decimals=9)
    count_B = exact_B.floor()
    missing = size - int(count_B.sum())
    count_B[(exact_B - count_B).argsort(descending=True, stable=True)[:missing]] += 1
    return torch.arange(len(probability_B)).repeat_interleave(count_B.long())


def cosine(a: Tensor, b: Tensor) -> float:
    return ((a * b).sum() / (a.norm() * b.norm())).item()
