"""Who moved the policy: how a batch's tokens, their gradient and the clipped ones divide by origin and age."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from solera.objectives.tokens import Tokens
from solera.records import Rollout, age_band

QUANTITIES = ("tokens", "weight", "clipped")


def contribution(tokens: Tokens, silenced_T: Tensor | None) -> Tensor:
    """Of each response its tokens, the sum of their `|∂loss/∂ℓ|`, and how many of them the clip silenced. `[3, B]`

    To be asked after the backward pass, with `logp_T` retaining its gradient.
    """
    one_T = torch.ones_like(tokens.logp_T)
    weight_T = torch.zeros_like(one_T) if tokens.logp_T.grad is None else tokens.logp_T.grad.abs()
    clipped_T = torch.zeros_like(one_T) if silenced_T is None else silenced_T.to(one_T.dtype)
    sums = torch.zeros(len(QUANTITIES), len(tokens.responses.length_B), dtype=one_T.dtype, device=one_T.device)
    return sums.index_add_(1, tokens.response_T, torch.stack([one_T, weight_T, clipped_T]).detach())


def shares(rollouts: Iterable[Rollout], sums: Tensor, now: int, lineage: str) -> dict[str, float]:
    """Each origin's and each age's part of what all responses together contributed. `sums` is `[3, B]`"""
    totals = [max(total, 0.0) for total in sums.sum(1).tolist()]
    found = defaultdict[str, float](float)
    for rollout, values in zip(rollouts, sums.T.tolist(), strict=True):
        kinds = ("origin", rollout.origin), ("age", age_band(rollout.age(now, lineage)))
        for quantity, value, total in zip(QUANTITIES, values, totals, strict=True):
            for kind, name in kinds:
                if total:
                    found[f"{kind}_{quantity}/{name}"] += value / total
    return dict(found)
