"""Attention over texts that lie one after the other without padding, through transformers' attention interface.

A model that is told to use `NAME` computes everything but attention itself; who attends to what comes with each call as
a `plan`. So one unmodified Hugging Face model serves packed training, prefill and decoding from a shared cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "solera"


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
    """Texts of one row: each sees its prefix and itself, up to its own place.

    `key_K` gathers the keys, text by text, where prefixes are shared (computed once, read by all that continue them).
    """

    query_end: Tensor
    key_end: Tensor
    longest_query: int
    longest_key: int
    key_K: Tensor | None

    @classmethod
    def of(cls, texts: Iterable[Text]) -> "PackedTexts":
        start, length, prefix_start, prefix_length = np.array([text for text in texts if text.length]).T
        gathered = np.stack([prefix_length, length], 1).ravel()
        key_K = np.repeat(np.stack([prefix_start, start], 1).ravel(), gathered) + count_up(gathered)
        return cls(
            query_end=_ends(length),
            key_end=_ends(prefix_length + length),
            longest_query=int(length.max()),
            longest_key=int((prefix_length + length).max()),
            key_K=torch.from_numpy(key_K) if prefix_length.any() else None,
        )

    def to(self, device: torch.device) -> "PackedTexts":
        moved = {name: v.to(device, non_blocking=True) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return PackedTexts(**{**vars(self), **moved})

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query_NHD, key_KHD, value_KHD = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.key_K is not None:
            key_KHD, value_KHD = key_KHD.index_select(0, self.key_K), value_KHD.index_select(0, self.key_K)
        attend = _flash if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else _plain
        return attend(query_NHD, key_KHD, value_KHD, self, scale)[None]


def count_up(length: np.ndarray) -> np.ndarray:
    """0 … length−1 for each stretch, one after the other."""
    return np.arange(length.sum()) - np.repeat(length.cumsum() - length, length)


def _ends(length: np.ndarray) -> Tensor:
    return torch.from_numpy(np.append(0, length.cumsum()).astype(np.int32))


def _flash(query_NHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, texts: PackedTexts, scale: float) -> Tensor:
    """Torch's flash attention; where a text has more keys than queries, the last of both are aligned."""
    out, *_ = torch.ops.aten._flash_attention_forward(
        query_NHD, key_KHD, value_KHD, texts.query_end, texts.key_end, texts.longest_query, texts.longest_key,
        0.0, True, False, scale=scale,
    )  # fmt: skip
    return out


def _plain(query_NHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, texts: PackedTexts, scale: float) -> Tensor:
    """The same text by text: for float32 and float64, and for processors without flash attention."""
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
