"""Attention over pages of keys and values: prompts, each computed once, and a response for each row.

A row's line in the table of pages names the pages of its prompt, then those of its response, which begins on a page of
its own. Moving a row, giving its place to another request or sharing a prompt among a group changes numbers only; no
key is ever copied.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from solera.engines.pages import NOBODY
from solera.models.attention import PackedTexts


@torch.library.custom_op("solera::attend_pages", mutates_args=("pool_key", "pool_value"))
def attend_pages(
    query_SHD: Tensor,
    key_SHD: Tensor,
    value_SHD: Tensor,
    pool_key: Tensor,
    pool_value: Tensor,
    page_SP: Tensor,
    prompt_length_S: Tensor,
    response_length_S: Tensor,
    alive_S: Tensor,
    scale: float,
) -> Tensor:
    """Write each row's new key and value behind its response, and attend to its prompt and response. `[S, heads, D]`
    Rows that are not alive get numbers that mean nothing."""
    lengths = prompt_length_S, response_length_S
    if query_SHD.is_cuda:
        from solera.engines import kernels  # triton is there only where a GPU is

        pools = pool_key, pool_value
        return kernels.decode_attention(query_SHD, key_SHD, value_SHD, *pools, page_SP, *lengths, alive_S, scale)
    page_SK, at_SK, real_SK = _places(page_SP, *lengths, pool_key.shape[1])
    new_S1 = (prompt_length_S + response_length_S)[:, None]
    new = page_SK.gather(1, new_S1)[:, 0], at_SK.gather(1, new_S1)[:, 0]
    pool_key[new], pool_value[new] = key_SHD, value_SHD
    return nn.functional.scaled_dot_product_attention(
        query_SHD[:, :, None], pool_key[page_SK, at_SK].transpose(1, 2), pool_value[page_SK, at_SK].transpose(1, 2),
        attn_mask=real_SK[:, None, None], scale=scale, enable_gqa=True,
    )[:, :, 0]  # fmt: skip


@attend_pages.register_fake
def _(query_SHD: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query_SHD)


def _places(
    page_SP: Tensor, prompt_length_S: Tensor, response_length_S: Tensor, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Page and place in it of each row's keys, the new one last, and which of them are real. The others are the last
    key of a page that only rows without a job write to, and those only its first key: it is always zero."""
    k = torch.arange(int((prompt_length_S + response_length_S).max()) + 1)
    gap_S = -prompt_length_S % tokens
    place_SK = k + torch.where(k < prompt_length_S[:, None], 0, gap_S[:, None])
    real_SK = k <= (prompt_length_S + response_length_S)[:, None]
    page_SK = page_SP.gather(1, torch.where(real_SK, place_SK // tokens, 0))
    return torch.where(real_SK, page_SK, NOBODY), torch.where(real_SK, place_SK % tokens, tokens - 1), real_SK


@dataclass(frozen=True, eq=False)
class Decoding:
    """The plan of one token a row (`_S`)."""

    page_SP: Tensor
    prompt_length_S: Tensor
    response_length_S: Tensor
    alive_S: Tensor
    """1 for a row that goes on. What others get is never read."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out_SHD = attend_pages(
            query[:, :, 0].contiguous(), key[:, :, 0].contiguous(), value[:, :, 0], module.pool_key, module.pool_value,
            self.page_SP, self.prompt_length_S, self.response_length_S, self.alive_S, scale,
        )  # fmt: skip
        return out_SHD[:, None]


@dataclass(frozen=True, eq=False)
class Places:
    """Where the keys and values of tokens stay: those of token n at place `at_N[n]` of page `page_N[n]`."""

    page_N: Tensor
    at_N: Tensor

    def keep(self, module: Any, key: Tensor, value: Tensor) -> None:
        key_NHD, value_NHD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if key.is_cuda:
            from solera.engines import kernels

            kernels.keep(key_NHD, value_NHD, module.pool_key, module.pool_value, self.page_N, self.at_N)
        else:
            module.pool_key[self.page_N, self.at_N] = key_NHD
            module.pool_value[self.page_N, self.at_N] = value_NHD


@dataclass(frozen=True, eq=False)
class Prefilling:
    """The plan of whole texts one after the other."""

    texts: PackedTexts
    places: Places

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.places.keep(module, key, value)
        return self.texts.attend(module, query, key, value, scale)


@dataclass(frozen=True, eq=False)
class Continuing:
    """The plan of a part of one text, behind `shared` tokens that were computed before. `page_P` are the pages of the
    text, and `turn` the length of its prompt."""

    places: Places
    page_P: Tensor
    turn: int
    shared: int

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.places.keep(module, key, value)
        pools, query_NHD = (module.pool_key, module.pool_value), query[0].transpose(0, 1)
        if query.is_cuda:
            from solera.engines import kernels

            return kernels.attend_to_pages(query_NHD, *pools, self.page_P, self.turn, self.shared, scale)[None]
        return attend_to_pages(query_NHD, *pools, self.page_P, self.turn, self.shared, scale)[None]


def attend_to_pages(
    query_NHD: Tensor, pool_key: Tensor, pool_value: Tensor, page_P: Tensor, turn: int, shared: int, scale: float
) -> Tensor:
    """Query m sees key n if n <= shared + m. `[N, heads, D]`"""
    m, tokens = torch.arange(len(query_NHD)), pool_key.shape[1]
    n = torch.arange(shared + len(query_NHD))
    place_K = n + torch.where(n < turn, 0, -turn % tokens)
    key_KHD, value_KHD = (pool[page_P[place_K // tokens], place_K % tokens] for pool in (pool_key, pool_value))
    out_1HND = nn.functional.scaled_dot_product_attention(
        query_NHD.transpose(0, 1)[None], key_KHD.transpose(0, 1)[None], value_KHD.transpose(0, 1)[None],
        attn_mask=n <= shared + m[:, None], scale=scale, enable_gqa=True,
    )  # fmt: skip
    return out_1HND[0].transpose(0, 1)
