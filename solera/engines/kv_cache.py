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
    scale: float,
) -> Tensor:
    """Write each row's new key and value behind its response, and attend to its prompt and response. `[S, heads, D]`"""
    lengths = prompt_length_S, response_length_S
    if query_SHD.is_cuda:
        from solera.engines import kernels  # triton is there only where a GPU is

        return kernels.decode_attention(query_SHD, key_SHD, value_SHD, pool_key, pool_value, page_SP, *lengths, scale)
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

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out_SHD = attend_pages(
            query[:, :, 0].contiguous(), key[:, :, 0].contiguous(), value[:, :, 0], module.pool_key, module.pool_value,
            self.page_SP, self.prompt_length_S, self.response_length_S, scale,
        )  # fmt: skip
        return out_SHD[:, None]


@dataclass(frozen=True, eq=False)
class Prefilling:
    """The plan of texts one after the other. Their keys and values stay in pages: those of token n at place
    `at_N[n]` of page `page_N[n]`."""

    texts: PackedTexts
    page_N: Tensor
    at_N: Tensor

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        key_NHD, value_NHD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if query.is_cuda:
            from solera.engines import kernels

            kernels.keep(key_NHD, value_NHD, module.pool_key, module.pool_value, self.page_N, self.at_N)
        else:
            module.pool_key[self.page_N, self.at_N] = key_NHD
            module.pool_value[self.page_N, self.at_N] = value_NHD
        return self.texts.attend(module, query, key, value, scale)
