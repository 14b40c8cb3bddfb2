"""Attention of packed texts on a GPU in 16 bits in which every sum has one order: the same in gives the same out.

Torch's flash attention adds up the gradients of queries, and a gather those of shared keys, in whatever order the GPU
comes to them. Here a program owns the queries or the keys that it adds to. Nothing is gathered: a prefix is read where
it lies.
"""

from typing import Any

import torch
from torch import Tensor, nn

TILE = 64
"""Places that one program takes."""


def wanted(module: nn.Module, query: Tensor) -> bool:
    return getattr(module, "repeatable", False) and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


@torch.library.custom_op("solera::attend_in_order", mutates_args=())
def attend(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, query_tiles: Tensor, key_tiles: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """What every query sees, `[N, H, D]`, and the log of its normaliser, `[H, N]`."""
    from solera.models import kernels

    return kernels.attend(_dense(query_NHD), _dense(key_NGD), _dense(value_NGD), query_tiles, scale)


@attend.register_fake
def _(query_NHD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    places, heads, _dim = query_NHD.shape
    return query_NHD.new_empty(query_NHD.shape), query_NHD.new_empty(heads, places, dtype=torch.float32)


@torch.library.custom_op("solera::differentiate_in_order", mutates_args=())
def differentiate(
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
    """Gradients of queries, keys and values."""
    from solera.models import kernels

    return kernels.differentiate(
        _dense(query_NHD), _dense(key_NGD), _dense(value_NGD), query_tiles, key_tiles, out_NHD, norm_HN,
        _dense(grad_NHD), scale,
    )  # fmt: skip


@differentiate.register_fake
def _(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query_NHD.new_empty(query_NHD.shape), key_NGD.new_empty(key_NGD.shape), value_NGD.new_empty(value_NGD.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, ctx.scale = inputs
    ctx.save_for_backward(*given, *output)


def _way_back(ctx: Any, grad_NHD: Tensor, _norm: Tensor) -> tuple[Tensor | None, ...]:
    return *differentiate(*ctx.saved_tensors, grad_NHD, ctx.scale), None, None, None


attend.register_autograd(_way_back, setup_context=_keep)


def _dense(x_NHD: Tensor) -> Tensor:
    """Heads whose numbers lie side by side; places and heads may lie anyhow."""
    return x_NHD if x_NHD.stride(2) == 1 else x_NHD.contiguous()
