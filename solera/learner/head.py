"""Log-probabilities and entropy straight from hidden states on a GPU.

Logits exist for one chunk of tokens at a time, in float32, in the forward pass and again in a backward pass of its own.
"""

from typing import Any

import torch
from torch import Tensor

from solera.models.wide import multiply


class ScoredHead(torch.autograd.Function):
    """`hidden [T, H], weight [V, H], target [T] -> logp [T], entropy [T]`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, temperature: float, chunk: int, entropic: bool
    ) -> tuple[Tensor, Tensor]:
        from solera.learner import kernels

        scored = [
            kernels.score(multiply(hidden, weight_VH), target, temperature)
            for hidden, target in zip(hidden_TH.split(chunk), target_T.split(chunk), strict=True)
        ]
        logp_T, entropy_T, lse_T = (torch.cat(parts) for parts in zip(*scored, strict=True))
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, entropy_T, lse_T)
        ctx.temperature, ctx.chunk, ctx.entropic = temperature, chunk, entropic
        if not entropic:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logp_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        from solera.learner import kernels

        hidden_TH, weight_VH, target_T, entropy_T, lse_T = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]  # adapters leave the head's weight frozen
        grad_hidden_TH = torch.empty_like(hidden_TH) if for_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if for_weight else None
        for start in range(0, len(hidden_TH), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad_TV = kernels.differentiate(
                multiply(hidden_TH[part], weight_VH), target_T[part], entropy_T[part], lse_T[part],
                grad_logp_T[part].contiguous(), grad_entropy_T[part].contiguous() if ctx.entropic else None,
                ctx.temperature, hidden_TH.dtype,
            )  # fmt: skip
            if grad_hidden_TH is not None:
                torch.mm(grad_TV, weight_VH, out=grad_hidden_TH[part])
            if grad_weight_VH is not None:
                grad_weight_VH += multiply(grad_TV.T, hidden_TH[part].T)
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight, None, None, None, None
