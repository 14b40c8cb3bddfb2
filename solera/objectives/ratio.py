"""Ratios of probabilities, on a flat vector of tokens (`_T`) that each name their response (`response_T`)."""

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0


def bounded_exp(exponent: Tensor) -> Tensor:
    """`exp(x)` with x clamped to ±20 in value only: the gradient passes.

    Were it stopped, the pull back from a huge ratio would vanish just where it is needed.
    """
    clamped = exponent.detach().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return torch.exp(exponent + (clamped - exponent.detach()))


def token_ratio(logp_T: Tensor, behaviour_logp_T: Tensor) -> Tensor:
    """`ρ_t = exp(ℓ_t − b_t)`"""
    assert logp_T.shape == behaviour_logp_T.shape
    assert logp_T.ndim == 1
    return bounded_exp(logp_T - behaviour_logp_T)


def sequence_ratio(logp_T: Tensor, behaviour_logp_T: Tensor, response_T: Tensor, responses: int) -> Tensor:
    """`w_i = exp(Σ_t (ℓ_t − b_t))`, standing on every token of its response."""
    assert logp_T.shape == behaviour_logp_T.shape == response_T.shape
    assert logp_T.ndim == 1
    return bounded_exp(response_sum(logp_T - behaviour_logp_T, response_T, responses))[response_T]


def response_sum(value_T: Tensor, response_T: Tensor, responses: int) -> Tensor:
    """Sum of a token quantity over each response. `[T] -> [B]`"""
    return value_T.new_zeros(responses).index_add(0, response_T, value_T)
