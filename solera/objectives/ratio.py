"""Exponentials that stay finite, and sums over responses or groups."""

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0


def bounded_exp(exponent: Tensor) -> Tensor:
    """`exp(x)` with the value of x clamped to ±20. The gradient still passes.

    Without the gradient, nothing would pull a token with a huge ratio back.
    """
    clamped = exponent.detach().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return torch.exp(exponent + (clamped - exponent.detach()))


def response_sum(value_T: Tensor, response_T: Tensor, responses: int) -> Tensor:
    """Sum of a token quantity over each response. `[T] -> [B]`"""
    return sum_by(response_T, value_T, responses)


def sum_by(number_N: Tensor, value_N: Tensor, count: int) -> Tensor:
    """Sum of the values that share a number. `[N, …] -> [count, …]`

    The order of summation is fixed. On a GPU, `index_add` would not fix it.
    """
    sums = value_N.new_zeros(count, *value_N.shape[1:])
    if value_N.is_cuda:
        return sums.index_put((number_N,), value_N, accumulate=True)
    return sums.index_add(0, number_N, value_N)
