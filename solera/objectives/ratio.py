"""Exponentials that stay finite, and sums over responses, on a flat vector of tokens (`_T`)."""

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
    return value_T.new_zeros(responses).index_add(0, response_T, value_T)
