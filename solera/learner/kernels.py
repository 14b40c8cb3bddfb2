"""Triton kernels over logits: log-probability and entropy of a row in one pass, and their gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _score(
    logits_ptr, target_ptr, logp_ptr, entropy_ptr, lse_ptr, vocabulary, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * vocabulary
    best = -1e30
    total = 0.0
    weighted = 0.0  # Σ exp(x − best)·(x − best)
    for first in range(0, vocabulary, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_best = tl.maximum(best, tl.max(x, 0))
        share = tl.exp(x - new_best)
        shrink = tl.exp(best - new_best)
        weighted = shrink * (weighted + (best - new_best) * total)
        weighted += tl.sum(tl.where(share > 0, share * (x - new_best), 0.0), 0)
        total = total * shrink + tl.sum(share, 0)
        best = new_best
    lse = best + tl.log(total)
    taken = tl.load(logits + tl.load(target_ptr + row)).to(tl.float32) * inverse_temperature
    tl.store(logp_ptr + row, taken - lse)
    tl.store(entropy_ptr + row, tl.log(total) - weighted / total)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _differentiate(
    logits_ptr, grad_ptr, target_ptr, entropy_ptr, lse_ptr, grad_logp_ptr, grad_entropy_ptr, vocabulary,
    inverse_temperature,
    BLOCK: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    """d logp = 1[target] − p; d entropy = −p·(log p + entropy); both over the temperature."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * vocabulary + v
    logp = tl.load(logits_ptr + at, mask=v < vocabulary, other=float("-inf")).to(tl.float32) * inverse_temperature
    logp -= tl.load(lse_ptr + row)
    share = tl.exp(logp)
    grad = tl.load(grad_logp_ptr + row) * (tl.where(v == tl.load(target_ptr + row), 1.0, 0.0) - share)
    if WITH_ENTROPY:
        slope = tl.where(share > 0, share * (logp + tl.load(entropy_ptr + row)), 0.0)
        grad -= tl.load(grad_entropy_ptr + row) * slope
    tl.store(grad_ptr + at, (grad * inverse_temperature).to(grad_ptr.dtype.element_ty), mask=v < vocabulary)


def score(logits_TV: Tensor, target_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the targets, entropy, and the log of the normaliser, in float32. `[T]` each."""
    rows, vocabulary = logits_TV.shape
    logp_T, entropy_T, lse_T = torch.empty(3, rows, dtype=torch.float32, device=logits_TV.device)
    _score[(rows,)](
        logits_TV, target_T, logp_T, entropy_T, lse_T, vocabulary, 1.0 / temperature, BLOCK=4096, num_warps=8
    )
    return logp_T, entropy_T, lse_T


def differentiate(
    logits_TV: Tensor, target_T: Tensor, entropy_T: Tensor, lse_T: Tensor, grad_logp_T: Tensor,
    grad_entropy_T: Tensor | None, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient with respect to the logits, in `dtype`."""
    rows, vocabulary = logits_TV.shape
    grad_TV = torch.empty_like(logits_TV, dtype=dtype)
    _differentiate[(rows, triton.cdiv(vocabulary, 4096))](
        logits_TV, grad_TV, target_T, entropy_T, lse_T, grad_logp_T,
        grad_logp_T if grad_entropy_T is None else grad_entropy_T, vocabulary, 1.0 / temperature, BLOCK=4096,
        WITH_ENTROPY=grad_entropy_T is not None, num_warps=8,
    )  # fmt: skip
    return grad_TV
