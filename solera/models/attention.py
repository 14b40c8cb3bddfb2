"""Attention over texts packed one after the other without padding, through transformers' attention interface.

A model that uses the attention `NAME` computes everything but attention itself. Each call passes a `plan` that says
which token attends to which. So one unmodified Hugging Face model serves packed training, prefill, and decoding from a
shared cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from solera.models import ordered
from solera.models.pinned import pinned
from solera.models.tiling import TILE

NAME = "solera"


class Plan(Protocol):
    """Which token attends to which in one call of the model."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Queries `[B, heads, T, D]`, and keys and values with fewer heads, give `[B, T, heads, D]`."""
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
    """The function that transformers calls in every layer. It fails without a plan instead of falling back."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attends_in: torch.dtype = getattr(module, "attends_in", query.dtype)
    return plan.attend(module, query.to(attends_in), key.to(attends_in), value.to(attends_in), scale), None


AttentionInterface.register(NAME, attention)


class Text(NamedTuple):
    """A stretch of tokens in the row, and the stretch before it that it continues (length 0 if none)."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """Texts packed in one row. Each sees its prefix and itself, up to its own position. A prefix is a text right before
    those that continue it; it is computed once and read by all of them.

    A GPU uses the tiles. Without one, if prefixes are shared, `key_K` gathers the keys of each text.
    """

    query_end: Tensor
    key_end: Tensor
    key_K: Tensor | None
    query_tiles: Tensor
    """For each tile of queries: first position, end and start of their text, start and length of its prefix."""
    key_tiles: Tensor
    """For each tile of keys: first position, end of their text, and end of the last text that sees them."""

    @classmethod
    def of(cls, texts: Iterable[Text]) -> "PackedTexts":
        text_X4 = np.array([text for text in texts if text.length])
        start, length, prefix_start, prefix_length = text_X4.T
        gathered = np.stack([prefix_length, length], 1).ravel()
        key_K = np.repeat(np.stack([prefix_start, start], 1).ravel(), gathered) + count_up(gathered)
        query_tiles, key_tiles = _tiles(text_X4)
        return cls(
            query_end=_ends(length),
            key_end=_ends(prefix_length + length),
            key_K=torch.from_numpy(key_K) if prefix_length.any() else None,
            query_tiles=query_tiles,
            key_tiles=key_tiles,
        )

    def padded(self, tiles: int) -> "PackedTexts | None":
        """The same with so many tiles, the last ones empty, so that one CUDA graph serves many batches. `None` if there
        are more already."""
        missing = tiles - len(self.query_tiles)
        if missing < 0:
            return None
        pad = partial(nn.functional.pad, pad=(0, 0, 0, missing))
        return replace(self, query_tiles=pad(self.query_tiles), key_tiles=pad(self.key_tiles))

    def to(self, device: torch.device) -> "PackedTexts":
        tensors = {name: v for name, v in vars(self).items() if isinstance(v, Tensor)}
        moved = {name: pinned(v, device).to(device, non_blocking=True) for name, v in tensors.items()}
        return PackedTexts(**{**vars(self), **moved})

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query_NHD, key_KHD, value_KHD = (x[0].transpose(0, 1) for x in (query, key, value))
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return ordered.attend(query_NHD, key_KHD, value_KHD, self.query_tiles, self.key_tiles, scale)[None]
        if self.key_K is not None:
            key_KHD, value_KHD = key_KHD.index_select(0, self.key_K), value_KHD.index_select(0, self.key_K)
        return _text_by_text(query_NHD, key_KHD, value_KHD, self, scale)[None]


def filler(start: int, stop: int) -> list[Text]:
    """Texts for the places from `start` to `stop`, which nobody reads. They are short, because attention takes the
    square of a length.

    >>> [(text.start, text.length) for text in filler(100, 200)]
    [(100, 64), (164, 36)]
    """
    return [Text(first, min(TILE, stop - first)) for first in range(start, stop, TILE)]


def count_up(length: np.ndarray) -> np.ndarray:
    """0 … length−1 for each stretch, concatenated."""
    return np.arange(length.sum()) - np.repeat(length.cumsum() - length, length)


def _tiles(text_X4: np.ndarray) -> tuple[Tensor, Tensor]:
    """Sort tiles by decreasing work, so that no long one starts last."""
    start, length, prefix_start, prefix_length = text_X4.T
    stop, seen_until = start + length, start + length
    continues = np.flatnonzero(prefix_length)
    continued = np.searchsorted(start, prefix_start[continues]).clip(max=len(start) - 1)
    np.add.at(seen_until, continued, length[continues])
    if not (
        np.array_equal(text_X4[continued, :2], text_X4[continues, 2:])
        and ((stop[continued] <= start[continues]) & (stop[continues] <= seen_until[continued])).all()
    ):
        raise ValueError("a prefix is a text that stands right before those that continue it")
    count = -(-length // TILE)
    text = np.repeat(np.arange(len(length)), count)
    first = start[text] + TILE * count_up(count)
    query_tiles = np.stack([first, stop[text], start[text], prefix_start[text], prefix_length[text]], 1)
    key_tiles = np.stack([first, stop[text], seen_until[text]], 1)
    keys, queries = prefix_length[text] + first - start[text], seen_until[text] - first
    return _in_order(query_tiles, -keys), _in_order(key_tiles, -queries)


def _in_order(rows: np.ndarray, by: np.ndarray) -> Tensor:
    return torch.from_numpy(rows[np.argsort(by, kind="stable")].astype(np.int32))


def _ends(length: np.ndarray) -> Tensor:
    return torch.from_numpy(np.append(0, length.cumsum()).astype(np.int32))


def _text_by_text(query_NHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, texts: PackedTexts, scale: float) -> Tensor:
    """For float32 and float64, and for processors without our kernels."""
    parts = []
    edges = zip(pairwise(texts.query_end.tolist()), pairwise(texts.key_end.tolist()), strict=True)
    for (q, q_end), (k, k_end) in edges:
        here = torch.arange(k_end - k - (q_end - q), k_end - k, device=query_NHD.device)
        sees = torch.arange(k_end - k, device=query_NHD.device) <= here[:, None]
        parts.append(
            nn.functional.scaled_dot_product_attention(
                query_NHD[q:q_end].transpose(0, 1)[None],
                key_KHD[k:k_end].transpose(0, 1)[None],
                value_KHD[k:k_end].transpose(0, 1)[None],
                attn_mask=sees,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        )
    return torch.cat(parts)
