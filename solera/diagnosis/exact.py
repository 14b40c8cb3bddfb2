"""Ground truth: policies so small that every response and every group of responses can be enumerated.

A policy is `logits_SV`: one row per prefix, over V tokens. Token 0 ends a response. Axes: `_S` prefixes, `_B` all
responses, `_T` their tokens, `_M` groups, `_G` their members. A bandit has length 1; its arms are its responses.
Arithmetic is float64.
"""

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

import torch
from torch import Tensor

END = 0


@dataclass(frozen=True)
class Space:
    """Every response that a policy can write: `[B, T]`, padded with END where `mask_BT` is false."""

    token_BT: Tensor
    mask_BT: Tensor
    prefix_BT: Tensor
    """The row of `logits_SV` that each token was drawn from."""
    prefixes: int
    vocabulary: int

    def __len__(self) -> int:
        return len(self.token_BT)


def space_of(vocabulary: int, length: int) -> Space:
    """All responses of up to `length` tokens: those that end with END, and those cut off by the limit.

    With V tokens and length L there are `Σ_{t<L} (V−1)^t + (V−1)^L` of them. Two tokens, length 2: `0`, `1 0`, `1 1`.
    """
    assert vocabulary >= 2
    assert length >= 1
    words = range(1, vocabulary)
    number = {prefix: s for s, prefix in enumerate(p for t in range(length) for p in product(words, repeat=t))}
    whole = [(*prefix, END) for prefix in number] + list(product(words, repeat=length))
    padding = [(*tokens, *[END] * (length - len(tokens))) for tokens in whole]
    rows = [[number[tokens[:t]] if t < len(tokens) else 0 for t in range(length)] for tokens in whole]
    return Space(
        token_BT=torch.tensor(padding),
        mask_BT=torch.tensor([[t < len(tokens) for t in range(length)] for tokens in whole]),
        prefix_BT=torch.tensor(rows),
        prefixes=len(number),
        vocabulary=vocabulary,
    )


def token_logp(space: Space, logits_SV: Tensor) -> Tensor:
    """`log π(token | prefix)`, and 0 after the end of a response. Differentiable in the logits. `[S, V] -> [B, T]`"""
    assert logits_SV.dtype == torch.float64
    assert logits_SV.shape == (space.prefixes, space.vocabulary)
    logp_SV = logits_SV.log_softmax(-1)
    return torch.where(space.mask_BT, logp_SV[space.prefix_BT, space.token_BT], 0.0)


def token_slope(space: Space, logits_SV: Tensor) -> Tensor:
    """`∂ log π(token | prefix) / ∂ logits`: one-hot token minus π, in its prefix's row. `[S, V] -> [B, T, S, V]`"""
    one_hot = torch.nn.functional.one_hot
    row_BTV = one_hot(space.token_BT, space.vocabulary) - logits_SV.softmax(-1)[space.prefix_BT]
    here_BTS = one_hot(space.prefix_BT, space.prefixes) * space.mask_BT[..., None]
    return here_BTS[..., None] * row_BTV[..., None, :]


def response_logp(space: Space, logits_SV: Tensor) -> Tensor:
    """`log π(y)`. `[S, V] -> [B]`"""
    return token_logp(space, logits_SV).sum(-1)


def expected_reward(space: Space, logits_SV: Tensor, reward_B: Tensor) -> Tensor:
    """`J(π) = Σ_y π(y)·r(y)`"""
    return (response_logp(space, logits_SV).exp() * reward_B).sum()


def policy_gradient(space: Space, logits_SV: Tensor, reward_B: Tensor) -> Tensor:
    """`∇J` in the logits. `[S, V] -> [S, V]`"""
    leaf_SV = logits_SV.detach().requires_grad_()
    return torch.autograd.grad(expected_reward(space, leaf_SV, reward_B), leaf_SV)[0]


def divergences(space: Space, logits_SV: Tensor, behaviour_logits_SV: Tensor) -> dict[str, float]:
    """The exact values of what `divergence` estimates from samples of α, as sums over all responses.

    `tv = ½Σ|π−α|` · `tv_token = E_α Σ_t (1−ρ_t)₊ / E_α n` · `kl = KL(α‖π)` · `kl_reverse = KL(π‖α)` ·
    `chi2 = Σ π²/α − 1` · `ess = 1/(1+chi2)`
    """
    logp_BT, behaviour_logp_BT = token_logp(space, logits_SV), token_logp(space, behaviour_logits_SV)
    log_w_B = (logp_BT - behaviour_logp_BT).sum(-1)
    pi_B, alpha_B = logp_BT.sum(-1).exp(), behaviour_logp_BT.sum(-1).exp()
    short_B = torch.where(space.mask_BT, 1 - (logp_BT - behaviour_logp_BT).exp(), 0.0).clamp_min(0).sum(-1)
    chi2 = (pi_B.square() / alpha_B).sum().item() - 1
    return {
        "tv": (pi_B - alpha_B).abs().sum().item() / 2,
        "tv_token": ((alpha_B * short_B).sum() / (alpha_B * space.mask_BT.sum(-1)).sum()).item(),
        "kl": -(alpha_B * log_w_B).sum().item(),
        "kl_reverse": (pi_B * log_w_B).sum().item(),
        "chi2": chi2,
        "ess": 1 / (1 + chi2),
    }


@dataclass(frozen=True)
class Groups:
    """Groups of G responses, and the weight of each group in an expectation. The weights sum to 1."""

    member_MG: Tensor
    weight_M: Tensor
    exact: bool

    def mean(self, value_M: Tensor) -> Tensor:
        """`E[value]` over groups. Trailing axes are kept. `[M, ...] -> [...]`"""
        return torch.tensordot(self.weight_M, value_M, dims=1)


def groups(probability_B: Tensor, size: int, limit: int, generator: torch.Generator) -> Groups:
    """Every group of `size` independent responses, ignoring order. If there are more than `limit`, a sample of `limit`.

    A multiset with counts n_y has probability `G!/Π n_y! · Π α(y)^n_y`.
    """
    if math.comb(len(probability_B) + size - 1, size) > limit:
        drawn_MG = torch.multinomial(probability_B, limit * size, replacement=True, generator=generator)
        return Groups(drawn_MG.view(limit, size), probability_B.new_full((limit,), 1 / limit), exact=False)
    member_MG = torch.tensor(list(combinations_with_replacement(range(len(probability_B)), size)))
    count_MB = torch.nn.functional.one_hot(member_MG, len(probability_B)).sum(1).double()
    orders_M = torch.lgamma(torch.tensor(size + 1.0, dtype=torch.float64)) - torch.lgamma(count_MB + 1).sum(-1)
    return Groups(member_MG, (orders_M + probability_B.log()[member_MG].sum(-1)).exp(), exact=True)
