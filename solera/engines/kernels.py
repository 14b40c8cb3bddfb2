"""Triton kernels for decoding: attention over the pool of keys and values, and sampling a token from its logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_attention(
    query_ptr, key_ptr, value_ptr, value_row, value_head, pool_key, pool_value, out_ptr,
    prompt_start, prompt_length, response_start, response_length, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per row and key-value head: its queries against the new token, the prompt and the response so far."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDTH)
    g = tl.arange(0, TILE)
    at = (row * HEADS * GROUP + head * GROUP + g)[:, None] * DIM + d[None, :]
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(query_ptr + at, mask=real, other=0.0)
    own = (row * HEADS + head) * DIM + d
    key = tl.load(key_ptr + own, mask=d < DIM, other=0.0)
    value = tl.load(value_ptr + row * value_row + head * value_head + d, mask=d < DIM, other=0.0)
    prompt = tl.load(prompt_start + row)
    turn = tl.load(prompt_length + row).to(tl.int32)
    response = tl.load(response_start + row)
    length = turn + tl.load(response_length + row).to(tl.int32)
    place = ((response + length - turn) * HEADS + head) * DIM + d
    tl.store(pool_key + place, key, mask=d < DIM)
    tl.store(pool_value + place, value, mask=d < DIM)
    best = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    total = tl.full([TILE], 1.0, tl.float32)
    acc = tl.zeros([TILE, WIDTH], tl.float32) + value.to(tl.float32)[None, :]
    for first in range(0, length, BLOCK):
        n = first + tl.arange(0, BLOCK)
        line = tl.where(n < turn, prompt + n, response - turn + n)
        at_n = (line[:, None] * HEADS + head) * DIM + d[None, :]
        there = (n < length)[:, None] & (d < DIM)[None, :]
        keys = tl.load(pool_key + at_n, mask=there, other=0.0)
        values = tl.load(pool_value + at_n, mask=there, other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        score = tl.where((n < length)[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        share = tl.exp(score - new_best[:, None])
        shrink = tl.exp(best - new_best)
        acc = acc * shrink[:, None] + tl.dot(share.to(values.dtype), values, input_precision=PRECISION)
        total = total * shrink + tl.sum(share, 1)
        best = new_best
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def decode_attention(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, pool_key: Tensor, pool_value: Tensor,
    prompt_start_S: Tensor, prompt_length_S: Tensor, response_start_S: Tensor, response_length_S: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Write each row's new key and value after its response, and attend to its prompt and response.

    Values may be strided, as part of a larger product. Blocks are small, so that all programs for a few hundred rows
    fit on the GPU at once: each waits for memory most of the time.
    """
    rows, heads, dim = key_SHD.shape
    if value_SHD.stride(2) != 1:
        value_SHD = value_SHD.contiguous()
    group = query_SHD.shape[1] // heads
    out_SHD = torch.empty_like(query_SHD)
    _decode_attention[(heads, rows)](
        query_SHD, key_SHD, value_SHD, value_SHD.stride(0), value_SHD.stride(1), pool_key, pool_value, out_SHD,
        prompt_start_S, prompt_length_S, response_start_S, response_length_S, scale,
        HEADS=heads, GROUP=group, TILE=max(16, triton.next_power_of_2(group)), DIM=dim,
        WIDTH=max(16, triton.next_power_of_2(dim)), BLOCK=32,
        PRECISION="ieee" if query_SHD.dtype == torch.float32 else "tf32", num_warps=2, num_stages=2,
    )  # fmt: skip
    return out_SHD


@triton.jit
def _sample(
    logits_ptr, uniform_ptr, token_ptr, logp_ptr, vocabulary, inverse_temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per row: find the first token whose cumulative probability exceeds the uniform number.

    The sums of blocks tell which block holds that token; only that block is read again.
    """
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * vocabulary
    b = tl.arange(0, BLOCKS)
    best_b = tl.full([BLOCKS], -1e30, tl.float32)
    total_b = tl.zeros([BLOCKS], tl.float32)
    for block in range(0, tl.cdiv(vocabulary, BLOCK)):
        v = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) * inverse_temperature
        best = tl.maximum(tl.max(x, 0), -1e30)
        best_b = tl.where(b == block, best, best_b)
        total_b = tl.where(b == block, tl.sum(tl.exp(x - best), 0), total_b)
    best = tl.max(best_b, 0)
    share_b = total_b * tl.exp(best_b - best)
    total = tl.sum(share_b, 0)
    target = tl.load(uniform_ptr + row) * total
    # Rounding may keep the sum below a uniform number close to 1: then take the last token with any probability.
    last_block = tl.max(tl.where(share_b > 0, b, 0), 0)
    block = tl.minimum(tl.sum((tl.cumsum(share_b, 0) <= target).to(tl.int32), 0), last_block)
    before = tl.sum(tl.where(b < block, share_b, 0.0), 0)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) * inverse_temperature
    share = tl.exp(x - best)
    reached = block * BLOCK + tl.sum((before + tl.cumsum(share, 0) <= target).to(tl.int32), 0)
    token = tl.minimum(reached, tl.max(tl.where(share > 0, v, 0), 0))
    x = tl.load(logits + token).to(tl.float32) * inverse_temperature
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, x - best - tl.log(total))


def sample(logits_SV: Tensor, uniform_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Same as `sampling.sample` over the whole distribution, in one pass over the logits plus one block of a second."""
    rows, vocabulary = logits_SV.shape
    token_S = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    logp_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    block = 4096
    _sample[(rows,)](
        logits_SV.contiguous(), uniform_S, token_S, logp_S, vocabulary, 1.0 / temperature,
        BLOCK=block, BLOCKS=max(2, triton.next_power_of_2(triton.cdiv(vocabulary, block))), num_warps=4,
    )  # fmt: skip
    return token_S, logp_S
