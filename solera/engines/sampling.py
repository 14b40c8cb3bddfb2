"""Drawing tokens: random numbers that depend on the request alone, and the distribution actually sampled from."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LARGEST_UNIFORM = 1.0 - 2.0**-22
"""Below 1 by more than float32 rounds away, so that a draw never passes the end of the distribution."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed_B: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.float32]:
    """`count` numbers in [0, 1) for each seed: the generator SplitMix64, all rows at once.

    A response's numbers depend on its seed alone, not on which others share its batch. `[B] -> [B, count]`
    """
    with np.errstate(over="ignore"):
        state_BT = seed_B[:, None] + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)[None, :]
        state_BT = (state_BT ^ (state_BT >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state_BT = (state_BT ^ (state_BT >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state_BT = state_BT ^ (state_BT >> np.uint64(31))
    uniform_BT = (state_BT >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.minimum(uniform_BT, LARGEST_UNIFORM).astype(np.float32)


def sample(logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability under the distribution it was drawn from (0 where greedy).

    Inverse transform: the first token whose cumulative probability exceeds the uniform number.
    """
    assert logits_BV.ndim == 2
    assert uniform_B.shape == logits_BV.shape[:1]
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1), logits_BV.new_zeros(len(logits_BV), dtype=torch.float32)
    logp_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    if top_p < 1.0:
        logp_BV = _truncate(logp_BV, top_p)
    cumulative_BV = logp_BV.exp().cumsum(dim=-1)
    target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    return token_B1[:, 0], logp_BV.gather(1, token_B1)[:, 0]


def _truncate(logp_BV: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens whose probabilities first reach `top_p`, and renormalise."""
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.exp().cumsum(dim=-1) - sorted_BV.exp()
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, -torch.inf)
    kept_BV = torch.empty_like(logp_BV).scatter(1, order_BV, sorted_BV)
    return torch.log_softmax(kept_BV, dim=-1)
