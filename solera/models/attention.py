"""Attention over texts that lie one after the other without padding, through transformers' attention interface.

A model that is told to use `NAME` computes everything but attention itself; who attends to what comes with each call as
a `plan`. So one unmodified Hugging Face model serves packed training, prefill and decoding from a shared cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "solera"
TILE_OF_TEXT = 64
"""Places that a GPU's program takes at once."""


class Plan(Protocol):
    """Who attends to what in one call of the model."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """`[B, heads, T, D]` and keys and values of fewer heads in, `[B, T, heads, D]` out."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    plan: Plan,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. Without a plan it fails, and does not fall back to something else."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attends_in: torch.dtype = getattr(module, "attends_in", query.dtype)
    return plan.attend(module, query.to(attends_in), key.to(attends_in), value.to(attends_in), scale), None


AttentionInterface.register(NAME, attention)


class Text(NamedTuple):
    """A stretch of tokens in the row, and the stretch before it that it continues (none: length 0)."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """Texts of one row: each sees its prefix and itself, up to its own place. A prefix is a text that stands right
    before those that continue it (computed once, read by all of them)."""

    text_X4: Tensor
    """`Text`s, on the CPU."""
    query_tiles: Tensor
    """For every few queries: first place, the end of their text, its start, its prefix's start and length."""
    key_tiles: Tensor
    """For every few keys: first place, the end of the text, and of the last text that sees them."""

    @classmethod
    def of(cls, texts: Iterable[Text]) -> "PackedTexts":
        text_X4 = np.array([text for text in texts if text.length], np.int32)
        start, length, prefix_start, prefix_length = text_X4.T
        stop = start + length
        number, first = _tiles(start, length)
        query_tiles = np.stack([first, stop[number], start[number], prefix_start[number], prefix_length[number]], 1)
        continues = np.flatnonzero(prefix_length)
        continued = np.searchsorted(start, prefix_start[continues]).clip(max=len(start) - 1)
        seen_until = stop.copy()
        np.add.at(seen_until, continued, length[continues])
        if not (
            np.array_equal(text_X4[continued, :2], text_X4[continues, 2:])
            and ((stop[continued] <= start[continues]) & (stop[continues] <= seen_until[continued])).all()
        ):
            raise ValueError("a prefix is a text that stands right before those that continue it")
        key_tiles = np.stack([first, stop[number], seen_until[number]], 1)
        return cls(
            torch.from_numpy(text_X4),
            torch.from_numpy(_longest_first(query_tiles, prefix_length[number] + first - start[number])),
            torch.from_numpy(_longest_first(key_tiles, seen_until[number] - first)),
        )

    def to(self, device: torch.device) -> "PackedTexts":
        query_tiles, key_tiles = (x.to(device, non_blocking=True) for x in (self.query_tiles, self.key_tiles))
        return PackedTexts(self.text_X4, query_tiles, key_tiles)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query_NHD, key_NGD, value_NGD = (x[0].transpose(0, 1) for x in (query, key, value))
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return Attention.apply(query_NHD, key_NGD, value_NGD, self.query_tiles, self.key_tiles, scale)[None]
        return _plain(query_NHD, key_NGD, value_NGD, self, scale)[None]


def count_up(length: np.ndarray) -> np.ndarray:
    """0 … length−1 for each stretch, one after the other."""
    return np.arange(length.sum()) - np.repeat(length.cumsum() - length, length)


def _tiles(start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The text and the first place of every tile."""
    count = -(-length // TILE_OF_TEXT)
    number = np.repeat(np.arange(len(length)), count)
    return number, (start[number] + TILE_OF_TEXT * count_up(count)).astype(np.int32)


def _longest_first(tiles: np.ndarray, work: np.ndarray) -> np.ndarray:
    """So that no long one is begun when the others are done."""
    return np.ascontiguousarray(tiles[np.argsort(-work, kind="stable")])


class Attention(torch.autograd.Function):
    """Attention of packed texts on a GPU in 16 bits, sums in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NHD: Tensor,
        key_NGD: Tensor,
        value_NGD: Tensor,
        query_tiles: Tensor,
        key_tiles: Tensor,
        scale: float,
    ) -> Tensor:
        from solera.models import kernels

        query_NHD, key_NGD, value_NGD = _dense(query_NHD), _dense(key_NGD), _dense(value_NGD)
        out_NHD, norm_HN = kernels.attend(query_NHD, key_NGD, value_NGD, query_tiles, scale)
        ctx.save_for_backward(query_NHD, key_NGD, value_NGD, out_NHD, norm_HN, query_tiles, key_tiles)
        ctx.scale = scale
        return out_NHD

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        from solera.models import kernels

        query_NHD, key_NGD, value_NGD, out_NHD, norm_HN, query_tiles, key_tiles = ctx.saved_tensors
        grads = kernels.differentiate(
            query_NHD, key_NGD, value_NGD, out_NHD, norm_HN, _dense(grad_NHD), query_tiles, key_tiles, ctx.scale
        )
        return *grads, None, None, None


def _dense(x_NHD: Tensor) -> Tensor:
    """Heads whose numbers lie side by side; places and heads may lie anyhow."""
    return x_NHD if x_NHD.stride(2) == 1 else x_NHD.contiguous()


def _plain(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, texts: PackedTexts, scale: float) -> Tensor:
    """The same text by text: for float32 and float64, and for processors without Triton."""
    parts = []
    for start, length, prefix_start, prefix_length in texts.text_X4.tolist():
        own, prefix = slice(start, start + length), slice(prefix_start, prefix_start + prefix_length)
        keys, values = (torch.cat([x[prefix], x[own]]).transpose(0, 1)[None] for x in (key_NGD, value_NGD))
        here = torch.arange(prefix_length, prefix_length + length, device=query_NHD.device)
        sees = torch.arange(prefix_length + length, device=query_NHD.device) <= here[:, None]
        out = nn.functional.scaled_dot_product_attention(
            query_NHD[own].transpose(0, 1)[None], keys, values, attn_mask=sees, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
