"""Exponentials that stay finite, and sums by response or group."""

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0


def bounded_exp(exponent: Tensor) -> Tensor:
    """`exp(x)` with x clamped to ±20 in value only: the gradient passes.

    Were it stopped, the pull back from a huge ratio would vanish just where it is needed.
    """
    clamped = exponent.detach().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return torch.exp(exponent + (clamped - exponent.detach()))


def response_sum(value_T: Tensor, response_T: Tensor, responses: int) -> Tensor:
    """Sum of a token quantity over each response. `[T] -> [B]`"""
    return sum_by(response_T, value_T, responses)


def sum_by(number_N: Tensor, value_N: Tensor, count: int) -> Tensor:
    """Sum of the values with each number, `[N, …] -> [count, …]`, always in the same order: on a GPU `index_add` has
    none."""
    sums = value_N.new_zeros(count, *value_N.shape[1:])
    if value_N.is_cuda:
        return sums.index_put((number_N,), value_N, accumulate=True)
    return sums.index_add(0, number_N, value_N)
