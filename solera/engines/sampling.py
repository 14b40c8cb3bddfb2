"""Sample tokens, and compute their log-probability under the distribution they were sampled from."""

import torch
from torch import Tensor


def sample(logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row and return its log-probability under the sampling distribution (0 if greedy).

    This is inverse transform sampling: take the first token whose cumulative probability exceeds the uniform number.
    """
    assert logits_BV.ndim == 2
    assert uniform_B.shape == logits_BV.shape[:1]
    if temperature == 0.0:
        largest_B, token_B = logits_BV.max(dim=-1)
        return token_B, (largest_B - largest_B).float()  # 0, but NaN if the largest logit is NaN
    logp_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    if top_p < 1.0:
        logp_BV = _truncate(logp_BV, top_p)
    cumulative_BV = logp_BV.exp().cumsum(dim=-1)
    target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    token_B1.clamp_(max=logp_BV.shape[1] - 1)  # past the last token if the target is rounded up or NaN
    return token_B1[:, 0], logp_BV.gather(1, token_B1)[:, 0]


def _truncate(logp_BV: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens whose probabilities add up to `top_p`, and renormalise."""
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.exp().cumsum(dim=-1) - sorted_BV.exp()
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, -torch.inf)
    kept_BV = torch.empty_like(logp_BV).scatter(1, order_BV, sorted_BV)
    return torch.log_softmax(kept_BV, dim=-1)
