"""Attention over packed texts on a GPU with a fixed order of sums: the same input gives the same output.

Torch's flash attention adds up the gradients of queries in whatever order the GPU reaches them, and so does a gather
with shared keys. Here each program owns the queries or keys that it adds to. Nothing is gathered: a prefix is read in
place. To torch's compiler these are opaque operators.
"""

from typing import Any

import torch
from torch import Tensor

torch.library.define(
    "solera::attend_in_order",
    "(Tensor query_NHD, Tensor key_NGD, Tensor value_NGD, Tensor query_tiles, Tensor key_tiles, float scale)"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    "solera::differentiate_in_order",
    "(Tensor query_NHD, Tensor key_NGD, Tensor value_NGD, Tensor query_tiles, Tensor key_tiles, Tensor out_NHD,"
    " Tensor norm_HN, Tensor grad_NHD, float scale) -> (Tensor, Tensor, Tensor)",
)


def attend(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, query_tiles: Tensor, key_tiles: Tensor, scale: float
) -> Tensor:
    """Return the attention output `[N, H, D]`."""
    out_NHD, _ = torch.ops.solera.attend_in_order(query_NHD, key_NGD, value_NGD, query_tiles, key_tiles, scale)
    return out_NHD


@torch.library.impl("solera::attend_in_order", "default")
def _attend(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, query_tiles: Tensor, key_tiles: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from solera.models import kernels

    return kernels.attend(_dense(query_NHD), _dense(key_NGD), _dense(value_NGD), query_tiles, scale)


@torch.library.register_fake("solera::attend_in_order")
def _(query_NHD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    places, heads, _dim = query_NHD.shape
    return query_NHD.new_empty(query_NHD.shape), query_NHD.new_empty(heads, places, dtype=torch.float32)


@torch.library.impl("solera::differentiate_in_order", "default")
def _differentiate(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    query_tiles: Tensor,
    key_tiles: Tensor,
    out_NHD: Tensor,
    norm_HN: Tensor,
    grad_NHD: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from solera.models import kernels

    return kernels.differentiate(
        _dense(query_NHD), _dense(key_NGD), _dense(value_NGD), query_tiles, key_tiles, out_NHD, norm_HN,
        _dense(grad_NHD), scale,
    )  # fmt: skip


@torch.library.register_fake("solera::differentiate_in_order")
def _(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query_NHD.new_empty(query_NHD.shape), key_NGD.new_empty(key_NGD.shape), value_NGD.new_empty(value_NGD.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, ctx.scale = inputs
    ctx.save_for_backward(*given, *output)


def _way_back(ctx: Any, grad_NHD: Tensor, _norm: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.solera.differentiate_in_order(*ctx.saved_tensors, grad_NHD, ctx.scale)
    return *grads, None, None, None


torch.library.register_autograd("solera::attend_in_order", _way_back, setup_context=_keep)


def _dense(x_NHD: Tensor) -> Tensor:
    """Make the values of a head contiguous; positions and heads may have any stride."""
    return x_NHD if x_NHD.stride(2) == 1 else x_NHD.contiguous()
