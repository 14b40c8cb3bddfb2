"""Triton kernels: attention over packed texts with its backward pass, and weighted sums of bits for digests."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from solera.models.tiling import TILE as PLACES

TILE = 16_384
LOG2_E = tl.constexpr(1.4426950408889634)
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _sum_tile(
    address_ptr, length_ptr, block_ptr, start_ptr, weight_ptr, sum_ptr,
    INTEGER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per tile of a block. Integers wrap around, so the order of additions does not matter."""
    tile = tl.program_id(0)
    block = tl.load(block_ptr + tile)
    start = tl.load(start_ptr + tile)
    length = tl.load(length_ptr + block)
    bits_ptr = tl.load(address_ptr + block).to(tl.pointer_type(INTEGER))
    total = tl.zeros([CHUNK], tl.int64)
    for first in range(0, TILE, CHUNK):
        n = start + first + tl.arange(0, CHUNK)
        bits = tl.load(bits_ptr + n, mask=n < length, other=0).to(tl.int64)
        total += bits * tl.load(weight_ptr + n, mask=n < length, other=0)
    tl.atomic_add(sum_ptr + block, tl.sum(total, 0), sem="relaxed")


def weighted_sums(blocks: list[Tensor], weight_N: Tensor) -> Tensor:
    """`Σ_n w_n·x_n` mod 2⁶⁴ of each contiguous block. All have one type, and none is longer than the weights."""
    device, size = weight_N.device, blocks[0].element_size()
    lengths = tuple(map(Tensor.numel, blocks))
    block_K, start_K = _tiles(device, lengths)
    sums = torch.zeros(len(blocks), dtype=torch.int64, device=device)
    _sum_tile[(len(block_K),)](
        _numbers(device, tuple(map(Tensor.data_ptr, blocks))), _numbers(device, lengths), block_K, start_K, weight_N,
        sums, INTEGER=_INTEGERS[size], TILE=TILE, CHUNK=2048, num_warps=8,
    )  # fmt: skip
    return sums


@lru_cache(maxsize=64)
def _tiles(device: torch.device, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The block and the first element of every tile."""
    tiles = [(block, start) for block, length in enumerate(lengths) for start in range(0, length, TILE)]
    block_K, start_K = torch.tensor(tiles, dtype=torch.int64, device=device).reshape(-1, 2).T.contiguous()
    return block_K, start_K


@lru_cache(maxsize=64)
def _numbers(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Cached, because each new one would wait for the GPU."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=["places"])
def _attend(
    query_ptr, key_ptr, value_ptr, out_ptr, norm_ptr, tile_ptr,
    query_place, query_head, key_place, key_head, value_place, value_head, places, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries and head: attends to the prefix and to the text itself, up to each query's
    position. Keys that all queries of the tile see come first, without a mask, then the others. Uses powers of two
    instead of e."""
    row = tile_ptr + 5 * tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(row)
    stop = tl.load(row + 1)
    start = tl.load(row + 2)
    prefix = tl.load(row + 3)
    shared = tl.load(row + 4)
    d = tl.arange(0, WIDTH)
    m = first + tl.arange(0, QUERIES)
    query = _rows(query_ptr + head * query_head, m, d, query_place, m < stop, DIM)
    best = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    length = shared + tl.minimum(first + QUERIES, stop) - start
    seen_by_all = (shared + first - start + 1) // KEYS * KEYS
    for edge in tl.static_range(2):
        for begin in range(seen_by_all if edge else 0, length if edge else seen_by_all, KEYS):
            n = begin + tl.arange(0, KEYS)
            place = tl.where(n < shared, prefix + n, start - shared + n)
            keys = _rows(key_ptr + head // GROUP * key_head, place, d, key_place, n < length, DIM)
            values = _rows(value_ptr + head // GROUP * value_head, place, d, value_place, n < length, DIM)
            score = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            if edge:
                score = tl.where((place[None, :] <= m[:, None]) & (n < length)[None, :], score, float("-inf"))
            new_best = tl.maximum(best, tl.max(score, 1))
            share = tl.exp2(score - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            acc = tl.dot(share.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
            total = total * shrink + tl.sum(share, 1)
            best = new_best
    at = (m.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(
        out_ptr + at,
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=(m < stop)[:, None] & (d < DIM)[None, :],
    )
    tl.store(norm_ptr + head * places + m, best + tl.log2(total), mask=m < stop)


@triton.jit(do_not_specialize=["places"])
def _differentiate_queries(
    query_ptr, key_ptr, value_ptr, out_ptr, norm_ptr, grad_ptr, pull_ptr, grad_query_ptr, tile_ptr,
    query_place, query_head, key_place, key_head, value_place, value_head, grad_place, grad_head, places, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Like `_attend`; also stores Σ out·grad of each query for the gradient of the keys."""
    row = tile_ptr + 5 * tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(row)
    stop = tl.load(row + 1)
    start = tl.load(row + 2)
    prefix = tl.load(row + 3)
    shared = tl.load(row + 4)
    d = tl.arange(0, WIDTH)
    m = first + tl.arange(0, QUERIES)
    query = _rows(query_ptr + head * query_head, m, d, query_place, m < stop, DIM)
    grad = _rows(grad_ptr + head * grad_head, m, d, grad_place, m < stop, DIM)
    out = _rows(out_ptr + head * DIM, m, d, HEADS * DIM, m < stop, DIM)
    norm = tl.load(norm_ptr + head * places + m, mask=m < stop, other=0.0)
    pull = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(pull_ptr + head * places + m, pull, mask=m < stop)
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    length = shared + tl.minimum(first + QUERIES, stop) - start
    seen_by_all = (shared + first - start + 1) // KEYS * KEYS
    for edge in tl.static_range(2):
        for begin in range(seen_by_all if edge else 0, length if edge else seen_by_all, KEYS):
            n = begin + tl.arange(0, KEYS)
            place = tl.where(n < shared, prefix + n, start - shared + n)
            keys = _rows(key_ptr + head // GROUP * key_head, place, d, key_place, n < length, DIM)
            values = _rows(value_ptr + head // GROUP * value_head, place, d, value_place, n < length, DIM)
            score = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            share = tl.exp2(score - norm[:, None])
            if edge:
                share = tl.where((place[None, :] <= m[:, None]) & (n < length)[None, :], share, 0.0)
            slope = share * (tl.dot(grad, tl.trans(values), input_precision=PRECISION) - pull[:, None])
            acc = tl.dot(slope.to(keys.dtype), keys, acc, input_precision=PRECISION)
    at = (m.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(
        grad_query_ptr + at,
        (acc * scale).to(grad_query_ptr.dtype.element_ty),
        mask=(m < stop)[:, None] & (d < DIM)[None, :],
    )


@triton.jit(do_not_specialize=["places"])
def _differentiate_keys(
    query_ptr, key_ptr, value_ptr, norm_ptr, grad_ptr, pull_ptr, grad_key_ptr, grad_value_ptr, tile_ptr,
    query_place, query_head, key_place, key_head, value_place, value_head, grad_place, grad_head, places, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of keys and key-value head: adds up all queries that see these keys, which are contiguous:
    the rest of their text, and the texts that continue it. No other program adds to these keys, so the order of sums is
    fixed. A missing query has gradient 0 and adds nothing."""
    row = tile_ptr + 3 * tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(row)
    stop = tl.load(row + 1)
    last = tl.load(row + 2)
    d = tl.arange(0, WIDTH)
    n = first + tl.arange(0, KEYS)
    keys = _rows(key_ptr + head * key_head, n, d, key_place, n < stop, DIM)
    values = _rows(value_ptr + head * value_head, n, d, value_place, n < stop, DIM)
    grad_keys = tl.zeros([KEYS, WIDTH], tl.float32)
    grad_values = tl.zeros([KEYS, WIDTH], tl.float32)
    sees_all = tl.minimum(first + KEYS, last)
    for member in range(0, GROUP):
        theirs = head * GROUP + member
        for edge in tl.static_range(2):
            for begin in range(sees_all if edge == 0 else first, last if edge == 0 else sees_all, QUERIES):
                m = begin + tl.arange(0, QUERIES)
                query = _rows(query_ptr + theirs * query_head, m, d, query_place, m < last, DIM)
                grad = _rows(grad_ptr + theirs * grad_head, m, d, grad_place, m < last, DIM)
                norm = tl.load(norm_ptr + theirs * places + m, mask=m < last, other=0.0)
                pull = tl.load(pull_ptr + theirs * places + m, mask=m < last, other=0.0)
                score = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * (scale * LOG2_E)
                share = tl.exp2(score - norm[None, :])
                if edge:
                    share = tl.where(n[:, None] <= m[None, :], share, 0.0)
                grad_values = tl.dot(share.to(grad.dtype), grad, grad_values, input_precision=PRECISION)
                slope = share * (tl.dot(values, tl.trans(grad), input_precision=PRECISION) - pull[None, :])
                grad_keys = tl.dot(slope.to(query.dtype), query, grad_keys, input_precision=PRECISION)
    at = (n.to(tl.int64) * (HEADS // GROUP) + head)[:, None] * DIM + d[None, :]
    real = (n < stop)[:, None] & (d < DIM)[None, :]
    tl.store(grad_key_ptr + at, (grad_keys * scale).to(grad_key_ptr.dtype.element_ty), mask=real)
    tl.store(grad_value_ptr + at, grad_values.to(grad_value_ptr.dtype.element_ty), mask=real)


@triton.jit
def _rows(base, line, d, stride, there, DIM: tl.constexpr):
    """`[line, d]` of a matrix, 0 outside of it."""
    return tl.load(
        base + line.to(tl.int64)[:, None] * stride + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0
    )


def attend(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, tiles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention output `[N, H, D]` and the binary logarithm of the normaliser `[H, N]`."""
    places, heads, dim = query_NHD.shape
    out_NHD = torch.empty(query_NHD.shape, dtype=query_NHD.dtype, device=query_NHD.device)
    norm_HN = torch.empty(heads, places, dtype=torch.float32, device=query_NHD.device)
    _attend[(tiles.shape[0], heads)](
        query_NHD, key_NGD, value_NGD, out_NHD, norm_HN, tiles,
        query_NHD.stride(0), query_NHD.stride(1), key_NGD.stride(0), key_NGD.stride(1),
        value_NGD.stride(0), value_NGD.stride(1), places, scale,
        **_sizes(heads, key_NGD.shape[1], dim, query_NHD.dtype, walked="KEYS"), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_NHD, norm_HN


def differentiate(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, query_tiles: Tensor, key_tiles: Tensor, out_NHD: Tensor,
    norm_HN: Tensor, grad_NHD: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    places, heads, dim = query_NHD.shape
    pull_HN = torch.empty_like(norm_HN)
    kind = heads, key_NGD.shape[1], dim, query_NHD.dtype
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query_NHD, key_NGD, value_NGD)]
    strides = [x.stride(axis) for x in (query_NHD, key_NGD, value_NGD, grad_NHD) for axis in (0, 1)]
    _differentiate_queries[(query_tiles.shape[0], heads)](
        query_NHD, key_NGD, value_NGD, out_NHD, norm_HN, grad_NHD, pull_HN, grads[0], query_tiles,
        *strides, places, scale, **_sizes(*kind, walked="KEYS"), num_warps=4, num_stages=2,
    )  # fmt: skip
    _differentiate_keys[(key_tiles.shape[0], key_NGD.shape[1])](
        query_NHD, key_NGD, value_NGD, norm_HN, grad_NHD, pull_HN, grads[1], grads[2], key_tiles,
        *strides, places, scale, **_sizes(*kind, walked="QUERIES"), num_warps=4, num_stages=3,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@lru_cache(maxsize=64)
def _sizes(heads: int, key_heads: int, dim: int, dtype: torch.dtype, walked: str) -> dict[str, Any]:
    """Constants of a kernel. The inner loop takes smaller steps for wide heads, so that they fit into shared memory."""
    width = max(16, triton.next_power_of_2(dim))
    return {
        "HEADS": heads, "GROUP": heads // key_heads, "DIM": dim, "WIDTH": width,
        **{"QUERIES": PLACES, "KEYS": PLACES, walked: min(PLACES, max(16, 4096 // width))},
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
