"""Aggregations: the weight that each token of a response has in the loss, counted over the whole minibatch.

`[B] -> [B]`. B responses take part, of `length_B` tokens each, in groups numbered by `group_B`; `limit` is the longest
response that the config allows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, Tensor, int], Tensor]


def token_mean(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/Σ n`: all tokens count alike."""
    return torch.ones_like(length_B) / length_B.sum()


def sequence_mean(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/(B·n_i)`: all responses count alike."""
    return 1.0 / (len(length_B) * length_B)


def sequence_sum(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/B`: the mean over responses of their sums."""
    return torch.ones_like(length_B) / len(length_B)


def fixed_length(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/(B·L)`: as `sequence_sum`, divided by the response limit."""
    return torch.ones_like(length_B) / (len(length_B) * limit)


def group_sum(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/P`: the mean over groups of their sums."""
    return torch.ones_like(length_B) / len(torch.unique(group_B))


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "fixed_length": fixed_length,
    "group_sum": group_sum,
}
