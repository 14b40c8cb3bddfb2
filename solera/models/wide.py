"""bfloat16 with little rounding: only inputs of matrix products have 8 bits; everything in between is float32.

bfloat16 has the range of float32, which models with large values need, but its steps of 1/256 are coarse: a residual
stream kept in it shifts a token's log-probability by more than a usual update does. Attention multiplies in float16,
whose steps are an eighth of that and whose range is ample for queries and keys.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ATTENDS_IN = torch.float16


def multiply(left_NK: Tensor, right_MK: Tensor) -> Tensor:
    """Multiply 16-bit matrices, sum and return in float32. `[N, K], [M, K] -> [N, M]`"""
    if left_NK.is_cuda:
        return torch.mm(left_NK, right_MK.T, out_dtype=torch.float32)
    return torch.mm(left_NK.float(), right_MK.float().T)


class Product(torch.autograd.Function):
    """`x [N, K], weight [M, K] -> x·weightᵀ [N, M]` in float32; both are rounded to the weight's type first."""

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        short_NK = x_NK.to(weight_MK.dtype)
        ctx.save_for_backward(short_NK, weight_MK)
        return multiply(short_NK, weight_MK)

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, Tensor | None]:
        short_NK, weight_MK = ctx.saved_tensors
        grad_NM = grad_NM.to(weight_MK.dtype)
        grad_weight_MK = grad_NM.T @ short_NK if ctx.needs_input_grad[1] else None
        grad_x_NK = multiply(grad_NM, weight_MK.T) if ctx.needs_input_grad[0] else None
        return grad_x_NK, grad_weight_MK


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear` in float32, except for the rounded inputs of the product."""
    product = Product.apply(input.float().flatten(0, -2), weight).unflatten(0, input.shape[:-1])
    return product if bias is None else product + bias


class Wide(nn.Linear):
    """A linear layer with 16-bit weights that returns float32."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class WideNorm(nn.LayerNorm):
    """A layer norm with 16-bit weights that computes in float32."""

    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias.float() if self.bias is not None else None
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight.float(), bias, self.eps)


class InFloat32:
    """A module whose tensors are read in float32. It says that it is of the module's class, or `super` would refuse it
    in that class's methods."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    def __reduce__(self) -> Any:
        return InFloat32, (self._module,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_module":  # asked for while it is copied, before it has a module
            raise AttributeError(name)
        found = getattr(self._module, name)
        return found.float() if isinstance(found, Tensor) and found.is_floating_point() else found


def widen(body: nn.Module, embedding: nn.Module, attentions: list[nn.Module]) -> None:
    """Make a model with bfloat16 weights compute in float32 from its embedding on. Experts multiply in bfloat16, as
    transformers does it; which experts a token gets is computed in float32."""
    embedding.is_wide = True  # type: ignore[assignment]
    embedding.register_forward_hook(_in_float32)
    for part in body.modules():
        if type(part) is nn.Linear:
            part.__class__ = Wide
        elif type(part) is nn.LayerNorm and part.elementwise_affine:
            part.__class__ = WideNorm
        elif type(part).__name__.endswith("Router"):
            part.forward = partial(type(part).forward, InFloat32(part))
    for attention in attentions:
        attention.attends_in = ATTENDS_IN  # type: ignore[assignment]


def _in_float32(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
    return embedded.float()
