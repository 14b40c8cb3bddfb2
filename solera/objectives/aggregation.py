"""Aggregations: the weight of each token of a response in the loss, computed over the whole minibatch.

`[B] -> [B]`. B responses take part. `length_B` is their number of tokens, `group_B` the index of their group, and
`limit` the longest response that the config allows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, Tensor, int], Tensor]


def token_mean(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/Σ n`: all tokens count equally."""
    return torch.ones_like(length_B) / length_B.sum()


def sequence_mean(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/(B·n_i)`: all responses count equally."""
    return 1.0 / (len(length_B) * length_B)


def sequence_sum(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/B`: the mean over responses of their token sums."""
    return torch.ones_like(length_B) / len(length_B)


def fixed_length(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/(B·L)`: `sequence_sum` divided by the response limit L."""
    return torch.ones_like(length_B) / (len(length_B) * limit)


def group_sum(length_B: Tensor, group_B: Tensor, limit: int) -> Tensor:
    """`1/P`: the mean over groups of their token sums."""
    return torch.ones_like(length_B) / len(torch.unique(group_B))


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "fixed_length": fixed_length,
    "group_sum": group_sum,
}
