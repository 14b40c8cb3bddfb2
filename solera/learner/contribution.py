"""Who moved the policy: the shares of each origin and age in a batch's tokens, its gradient and its clipped tokens."""

import torch
from torch import Tensor

from solera.batch import Parts
from solera.objectives.ratio import sum_by
from solera.objectives.tokens import Tokens
from solera.records import age_band

QUANTITIES = ("tokens", "weight", "clipped")


def contribution(
    tokens: Tokens, part_T: Tensor, parts: int, silenced_T: Tensor | None, scale: float = 1.0
) -> Tensor:  # fmt: skip
    """For each part of a response (`batch.Parts`): its tokens, the sum of their `|∂loss/∂ℓ|`, and how many of them the
    clip silenced. `[3, P]`

    Call it after the backward pass of the loss times `scale`. `logp_T` must retain its gradient.
    """
    one_T = torch.ones_like(tokens.logp_T)
    weight_T = torch.zeros_like(one_T) if tokens.logp_T.grad is None else tokens.logp_T.grad.abs() / scale
    clipped_T = torch.zeros_like(one_T) if silenced_T is None else silenced_T.to(one_T.dtype)
    value_T3 = torch.stack([one_T, weight_T, clipped_T], 1).detach()
    return sum_by(part_T, value_T3, parts).T


def shares(parts: Parts, sums: Tensor, now: int, lineage: str) -> dict[str, float]:
    """The share of each origin and of each age in what all parts of the responses contributed. `sums` is `[3, P]`

    Empty if all of them have the same origin and age.
    """
    ages = [parts.age(part, now, lineage) for part in range(len(parts.response_P))]
    by_age = _divided("age", ["none" if age is None else age_band(age) for age in ages], sums)
    return _divided("origin", [parts.rollouts[b].origin for b in parts.response_P.tolist()], sums) | by_age


def _divided(kind: str, name_B: list[str], sums: Tensor) -> dict[str, float]:
    names = sorted(set(name_B))
    if len(names) < 2:
        return {}
    number_B = torch.tensor([names.index(name) for name in name_B])
    by_name = torch.zeros(len(sums), len(names), dtype=torch.float64).index_add_(1, number_B, sums.double())
    totals = by_name.sum(1)
    return {
        f"{kind}_{quantity}/{name}": float(value / total)
        for quantity, values, total in zip(QUANTITIES, by_name, totals, strict=True)
        for name, value in zip(names, values, strict=True)
        if total > 0
    }
