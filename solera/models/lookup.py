"""The embedding of tokens, whose gradient is summed in a fixed order, and if needed in float32.

A GPU adds up the gradients of few and frequent tokens in whatever order it reaches them (torch 2.11 and later).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class Lookup(torch.autograd.Function):
    """`token […], weight [V, H] -> […, H]` in `dtype`, in which a CPU sums gradients. A GPU takes them in the type of
    the weights, and sums in float32. Token `unused` gets none; -1 is no token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, weight_VH: Tensor, unused: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(token)
        ctx.vocabulary, ctx.dtype, ctx.unused = len(weight_VH), weight_VH.dtype, unused
        return nn.functional.embedding(token, weight_VH).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (token,) = ctx.saved_tensors
        grad_NH = grad.flatten(0, -2).to(ctx.dtype if grad.is_cuda else grad.dtype).contiguous()
        return None, sums_in_order(grad_NH, token.flatten(), ctx.vocabulary, ctx.unused).to(ctx.dtype), None, None


def sums_in_order(grad_NH: Tensor, token_N: Tensor, vocabulary: int, unused: int) -> Tensor:
    """`Σ_n grad_n` over all places n of each token. `[N, H], [N] -> [V, H]`"""
    if not grad_NH.is_cuda:
        return torch.ops.aten.embedding_dense_backward(grad_NH, token_N, vocabulary, unused, False)
    # For bags of tokens torch has only the kernel with a fixed order. Here each token is a bag.
    bag_N, none = torch.arange(len(token_N), device=token_N.device), token_N.new_empty(0)
    return torch.ops.aten._embedding_bag_dense_backward(
        grad_NH, token_N, bag_N, torch.ones_like(bag_N), none, vocabulary, False, 0, None, unused
    )


class Ordered(nn.Embedding):
    """An embedding whose gradient is summed in a fixed order on a GPU."""

    is_wide = False
    """Whether it returns float32 whatever its weights are. On a CPU, bfloat16 gradients of a token that occurs often
    would be summed in bfloat16, where 256 + 1 is 256."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.is_wide or input.is_cuda):
            return super().forward(input)
        unused = -1 if self.padding_idx is None else self.padding_idx
        return Lookup.apply(input, self.weight, unused, torch.float32 if self.is_wide else self.weight.dtype)


def put_in_order(embedding: nn.Module) -> None:
    """Make an `nn.Embedding`, or one of a class derived from it, sum in a fixed order."""
    if isinstance(embedding, nn.Embedding) and not isinstance(embedding, Ordered):
        embedding.__class__ = _ordered(type(embedding))  # type: ignore[arg-type]


@cache
def _ordered(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """`Ordered` comes after `kind`, whose own `forward` may call that of `nn.Embedding` and change the result."""
    return Ordered if kind is nn.Embedding else type(kind.__name__, (kind, Ordered), {})
