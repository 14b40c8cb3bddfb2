"""The pool of keys and values that decoding reads: prompts, each computed once, and a place for each response.

A row attends to two stretches of the pool, its prompt's and its own. Moving a row, giving its place to another request
or sharing a prompt among a group changes numbers only; no key is ever copied.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from solera.models.attention import PackedTexts


@torch.library.custom_op("solera::attend_pool", mutates_args=("pool_key", "pool_value"))
def attend_pool(
    query_SHD: Tensor,
    key_SHD: Tensor,
    value_SHD: Tensor,
    pool_key: Tensor,
    pool_value: Tensor,
    prompt_start_S: Tensor,
    prompt_length_S: Tensor,
    response_start_S: Tensor,
    response_length_S: Tensor,
    scale: float,
) -> Tensor:
    """Write each row's new key and value behind its response, and attend to its prompt and response. `[S, heads, D]`"""
    stretches = (prompt_start_S, prompt_length_S, response_start_S, response_length_S)
    if query_SHD.is_cuda:
        from solera.engines import kernels  # triton is there only where a GPU is

        return kernels.decode_attention(query_SHD, key_SHD, value_SHD, pool_key, pool_value, *stretches, scale)
    place_S = response_start_S + response_length_S
    pool_key[place_S], pool_value[place_S] = key_SHD, value_SHD
    place_SK, real_SK = _places(*stretches)
    return nn.functional.scaled_dot_product_attention(
        query_SHD[:, :, None], pool_key[place_SK].transpose(1, 2), pool_value[place_SK].transpose(1, 2),
        attn_mask=real_SK[:, None, None], scale=scale, enable_gqa=True,
    )[:, :, 0]  # fmt: skip


@attend_pool.register_fake
def _(query_SHD: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query_SHD)


def _places(
    prompt_start_S: Tensor, prompt_length_S: Tensor, start_S: Tensor, length_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Where each row's keys lie, the new one last, padded with place 0; and which of them are real."""
    k = torch.arange(int((prompt_length_S + length_S).max()) + 1)
    in_prompt = k < prompt_length_S[:, None]
    place_SK = torch.where(in_prompt, prompt_start_S[:, None] + k, (start_S - prompt_length_S)[:, None] + k)
    real_SK = k <= (prompt_length_S + length_S)[:, None]
    return torch.where(real_SK, place_SK, 0), real_SK


@dataclass(frozen=True, eq=False)
class Decoding:
    """The plan of one token a row (`_S`)."""

    prompt_start_S: Tensor
    prompt_length_S: Tensor
    response_start_S: Tensor
    response_length_S: Tensor

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out_SHD = attend_pool(
            query[:, :, 0].contiguous(), key[:, :, 0].contiguous(), value[:, :, 0],
            module.pool_key, module.pool_value,
            self.prompt_start_S, self.prompt_length_S, self.response_start_S, self.response_length_S, scale,
        )  # fmt: skip
        return out_SHD[:, None]


@dataclass(frozen=True, eq=False)
class Prefilling:
    """The plan of prompts one after the other; their keys and values stay in the pool at `place_N`."""

    texts: PackedTexts
    place_N: Tensor

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        module.pool_key[self.place_N] = key[0].transpose(0, 1)  # type: ignore[operator]
        module.pool_value[self.place_N] = value[0].transpose(0, 1)  # type: ignore[operator]
        return self.texts.attend(module, query, key, value, scale)
