"""Triton kernels for decoding: what a layer computes between its products, attention over the pool of keys and values,
and sampling a token from its logits."""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from solera.engines.tables import Memory, RowTable

FEW_PROGRAMS = 400
"""Up to three programs for each of an H200's 132 processors. With Triton 3.9 only two run at once."""


@triton.jit
def _heads(
    base, row_of, g, d, DIM: tl.constexpr, there, norm_ptr, epsilon, cos, sin, ROTATE: tl.constexpr, NORM: tl.constexpr
):
    """Vectors of some heads of one row, `[g, d]`, normalised and rotated by their position where the model does so.
    `cos` and `sin` have one line for all heads, or one for each."""
    x = tl.load(base + row_of + g[:, None] * DIM + d[None, :], mask=there, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]
        x = x * scale * tl.load(norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    if ROTATE:
        other = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
        pair = tl.load(base + row_of + g[:, None] * DIM + other[None, :], mask=there, other=0.0).to(tl.float32)
        if NORM:
            pair = pair * scale * tl.load(norm_ptr + other, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        pair = tl.where((d < DIM // 2)[None, :], -pair, pair)
        x = x * cos + pair * sin
    return x


@triton.jit
def _see(query, keys, values, seen, scale, best, total, acc, PRECISION: tl.constexpr):
    """Softmax over the keys so far and these: the largest score, the sum of exponentials and the weighted values."""
    score = tl.where(seen, tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    share = tl.exp(score - new_best[:, None])
    shrink = tl.exp(best - new_best)
    acc = acc * shrink[:, None] + tl.dot(share.to(values.dtype), values, input_precision=PRECISION)
    return new_best, total * shrink + tl.sum(share, 1), acc


@triton.jit
def _see_block(query_t, keys, values, seen, steepness, best, own, total, acc, PRECISION: tl.constexpr):
    """The same with keys in rows and queries in columns, as powers of two: `steepness` is the scale times log2(e).

    Matrix units take 16 rows and 8 columns at least, and there are many keys, but few queries. The sums stay divided
    among the places of a block, `total`, beside the one that was there before the first block, `own`.
    """
    score = tl.where(seen, tl.dot(keys, query_t, input_precision=PRECISION), float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 0) * steepness)
    share = tl.exp2(score * steepness - new_best[None, :])
    shrink = tl.exp2(best - new_best)
    acc = tl.dot(values, share.to(values.dtype), acc * shrink[None, :], input_precision=PRECISION)
    return new_best, own * shrink, total * shrink[None, :] + share, acc


@triton.jit
def _decode_attention(
    query_ptr, key_ptr, value_ptr, query_row, key_row, value_row, pool_key, pool_value, out_ptr,
    page_ptr, page_row, prompt_length, response_length, alive_ptr, scale,
    cos_ptr, sin_ptr, query_norm, key_norm, epsilon,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program per row and key-value head: its queries against the new token, the prompt and the response so far.

    Keys come in blocks of the prompt, then of the response. A page holds whole blocks, so each lies in one page. A row
    that has ended reads no keys: nobody reads what it gets.

    Instructions take a good part of the time, so there are few of them. Each query computes the new key for itself,
    which needs no exchange between threads.

    The number of the next block's page is loaded a block ahead, outside of Triton's pipeline of keys. In it, it would
    take the shared memory of one program in twelve, and 512 rows with three heads would not run all at once.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDTH)
    g = tl.arange(0, TILE)
    b = tl.arange(0, BLOCK).to(tl.int64)
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    turn = tl.load(prompt_length + row).to(tl.int32)
    written = tl.load(response_length + row).to(tl.int32)
    prompt_pages = page_ptr + row * page_row
    response_pages = prompt_pages + tl.cdiv(turn, PAGE)
    here = tl.load(prompt_pages)
    newest = tl.load(response_pages + written // PAGE)
    cos = tl.full([TILE, WIDTH], 1.0, tl.float32)
    sin = tl.zeros([TILE, WIDTH], tl.float32)
    if ROTATE:
        angle = row * DIM + g[:, None] * 0 + d[None, :]
        cos = tl.load(cos_ptr + angle, mask=real, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=real, other=0.0).to(tl.float32)
    query = _heads(
        query_ptr, row * query_row + head * GROUP * DIM, g, d, DIM, real, query_norm, epsilon, cos, sin, ROTATE, NORM
    ).to(pool_key.dtype.element_ty)
    key = _heads(
        key_ptr, row * key_row + head * DIM, g * 0, d, DIM, real, key_norm, epsilon, cos, sin, ROTATE, NORM
    ).to(pool_key.dtype.element_ty)
    new = row * value_row + head * DIM + d[:, None] + g[None, :] * 0
    value = tl.load(value_ptr + new, mask=tl.trans(real), other=0.0).to(pool_value.dtype.element_ty)
    query_t = tl.trans(query)
    steepness = scale * 1.4426950408889634  # log2(e)
    best = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * steepness
    own = tl.full([TILE], 1.0, tl.float32)
    total = tl.zeros([BLOCK, TILE], tl.float32)
    acc = value.to(tl.float32)
    key_at = pool_key + head * DIM + b[:, None] * (HEADS * DIM) + d[None, :]
    value_at = pool_value + head * DIM + d[:, None] + b[None, :] * (HEADS * DIM)
    prompt_blocks = tl.cdiv(turn, BLOCK)
    blocks = tl.where(tl.load(alive_ptr + row) > 0, prompt_blocks + tl.cdiv(written, BLOCK), 0)
    for n in range(0, blocks):
        first = tl.where(n < prompt_blocks, n, n - prompt_blocks) * BLOCK
        left = tl.where(n < prompt_blocks, turn, written) - first
        # Triton 3.9 does not see how places are aligned, and would fetch number by number.
        start = tl.multiple_of(here * UNIT + (first & (PAGE - 1)) * (HEADS * DIM), (UNIT | DIM) & -(UNIT | DIM))
        keys = tl.load(key_at + start, mask=(b < left)[:, None] & (d < DIM)[None, :], other=0.0)
        values = tl.load(value_at + start, mask=(b < left)[None, :] & (d < DIM)[:, None], other=0.0)
        best, own, total, acc = _see_block(
            query_t, keys, values, (b < left)[:, None], steepness, best, own, total, acc, PRECISION
        )
        after = n + 1
        page = tl.where(
            after < prompt_blocks, prompt_pages + after * BLOCK // PAGE,
            response_pages + (after - prompt_blocks) * BLOCK // PAGE,
        )  # fmt: skip
        here = tl.load(page, mask=after < blocks, other=0)
    # Behind the loop, because the first keys would wait for the page's number.
    place = newest * UNIT + ((written % PAGE) * HEADS + head) * DIM
    tl.store(pool_key + place + g[:, None] * 0 + d[None, :], key, mask=real & (g == 0)[:, None])
    tl.store(pool_value + place + d[:, None] + g[None, :] * 0, value, mask=tl.trans(real) & (g == 0)[None, :])
    out = d[:, None] + ((row * HEADS + head) * GROUP + g)[None, :] * DIM
    found = acc * (1.0 / (own + tl.sum(total, 0)))[None, :]
    tl.store(out_ptr + out, found.to(out_ptr.dtype.element_ty), mask=tl.trans(real))


class Rotation(NamedTuple):
    """What queries and keys go through before they meet: norms of their heads, where a model has them, and rotation by
    position, `[S, D]`."""

    cos_SD: Tensor
    sin_SD: Tensor
    query_norm_D: Tensor | None = None
    key_norm_D: Tensor | None = None
    epsilon: float = 0.0


def decode_attention(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, pool_key: Tensor, pool_value: Tensor,
    page_SP: Tensor, prompt_length_S: Tensor, response_length_S: Tensor, alive_S: Tensor, scale: float,
    rotation: Rotation | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Write each row's new key and value after its response, and attend to its prompt and response. Rows that are not
    alive get numbers that mean nothing.

    Queries, keys and values may be parts of one larger product: heads lie one after the other, rows anywhere. The scale
    is above 0.
    """
    assert scale > 0
    rows, heads, dim = key_SHD.shape
    query_SHD, key_SHD, value_SHD = (_with_heads_in_line(x) for x in (query_SHD, key_SHD, value_SHD))
    group = query_SHD.shape[1] // heads
    out_SHD = torch.empty(query_SHD.shape, dtype=dtype or query_SHD.dtype, device=query_SHD.device)
    few = rows * heads <= FEW_PROGRAMS
    cos, sin, query_norm, key_norm, epsilon = rotation or Rotation(out_SHD, out_SHD)
    _decode_attention[(heads, rows)](
        query_SHD, key_SHD, value_SHD, query_SHD.stride(0), key_SHD.stride(0), value_SHD.stride(0),
        pool_key, pool_value, out_SHD,
        page_SP, page_SP.stride(0), prompt_length_S, response_length_S, alive_S, scale,
        cos, sin, out_SHD if query_norm is None else query_norm, out_SHD if key_norm is None else key_norm, epsilon,
        HEADS=heads, GROUP=group, TILE=max(8, triton.next_power_of_2(group)), DIM=dim,
        WIDTH=max(16, triton.next_power_of_2(dim)), PAGE=pool_key.shape[1], UNIT=pool_key.stride(0),
        PRECISION="ieee" if pool_key.dtype == torch.float32 else "tf32",
        ROTATE=rotation is not None, NORM=query_norm is not None, **_key_blocks(few, pool_key),
    )  # fmt: skip
    return out_SHD


def _key_blocks(few: bool, pool_key: Tensor) -> dict[str, int]:
    """For many rows of heads of 64, blocks are small, so that all programs fit on the GPU at once: each waits for
    memory most of the time. For few rows they are large, because nobody else is waiting. Measured on an H200, for
    larger heads with 256 rows."""
    page, dim = pool_key.shape[1], pool_key.shape[-1]
    width = dim * pool_key.itemsize
    block = 32 if width > 256 else 64 if width > 128 else 128 if few else 32
    warps = 4 if few else 1 if dim <= 64 else 2
    return {"BLOCK": min(block, page), "num_warps": warps, "num_stages": 3}


def _with_heads_in_line(x_SHD: Tensor) -> Tensor:
    return x_SHD if x_SHD.stride(2) == 1 and x_SHD.stride(1) == x_SHD.shape[2] else x_SHD.contiguous()


@triton.jit(do_not_specialize=["turn", "shared", "count"])
def _attend_to_pages(
    query_ptr, query_place, query_head, pool_key, pool_value, out_ptr, page_ptr, turn, shared, count, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries and head. Query m sees key n if n <= shared + m."""
    first = tl.program_id(0) * QUERIES
    head = tl.program_id(1)
    m = first + tl.arange(0, QUERIES)
    d = tl.arange(0, WIDTH)
    there = (m < count)[:, None] & (d < DIM)[None, :]
    places = m.to(tl.int64)[:, None]
    query = tl.load(query_ptr + places * query_place + head * query_head + d[None, :], mask=there, other=0.0)
    query = query.to(pool_key.dtype.element_ty)
    gap = (turn + PAGE - 1) // PAGE * PAGE - turn
    length = shared + tl.minimum(first + QUERIES, count)
    best = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    for begin in range(0, length, KEYS):
        n = begin + tl.arange(0, KEYS)
        p = tl.where(n < turn, n, n + gap)
        page = tl.load(page_ptr + p // PAGE, mask=n < length, other=0)
        at_n = page[:, None] * UNIT + (((p & (PAGE - 1)) * HEADS + head // GROUP) * DIM)[:, None] + d[None, :]
        real = (n < length)[:, None] & (d < DIM)[None, :]
        keys = tl.load(pool_key + at_n, mask=real, other=0.0)
        values = tl.load(pool_value + at_n, mask=real, other=0.0)
        seen = n[None, :] <= shared + m[:, None]
        best, total, acc = _see(query, keys, values, seen, scale, best, total, acc, PRECISION)
    at = (places * HEADS * GROUP + head) * DIM + d[None, :]
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)


def attend_to_pages(
    query_NHD: Tensor, pool_key: Tensor, pool_value: Tensor, page_P: Tensor, turn: int, shared: int, scale: float
) -> Tensor:
    """Attention of a part of one text, whose keys and values are in pages: its own, and those of `shared` tokens
    before. `turn` is the length of its prompt, after which it goes on with another page."""
    count, all_heads, dim = query_NHD.shape
    heads = pool_key.shape[2]
    query_NHD = query_NHD if query_NHD.stride(2) == 1 else query_NHD.contiguous()
    out_NHD = torch.empty(query_NHD.shape, dtype=query_NHD.dtype, device=query_NHD.device)
    _attend_to_pages[(triton.cdiv(count, 64), all_heads)](
        query_NHD, query_NHD.stride(0), query_NHD.stride(1), pool_key, pool_value, out_NHD, page_P, turn, shared, count,
        scale, HEADS=heads, GROUP=all_heads // heads, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
        PAGE=pool_key.shape[1], UNIT=pool_key.stride(0), QUERIES=64, KEYS=64,
        PRECISION="ieee" if pool_key.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_NHD


@triton.jit
def _keep(
    key_ptr, value_ptr, key_place, key_head, value_place, value_head, pool_key, pool_value, page_ptr, at_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One program per token: write its key and value to their place."""
    n = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, TILE)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    real = (h < HEADS) & (d < DIM)
    place = tl.load(page_ptr + n) * UNIT + (tl.load(at_ptr + n) * HEADS + h) * DIM + d
    key = tl.load(key_ptr + n * key_place + h * key_head + d, mask=real, other=0.0)
    value = tl.load(value_ptr + n * value_place + h * value_head + d, mask=real, other=0.0)
    tl.store(pool_key + place, key.to(pool_key.dtype.element_ty), mask=real)
    tl.store(pool_value + place, value.to(pool_value.dtype.element_ty), mask=real)


def keep(
    key_NHD: Tensor, value_NHD: Tensor, pool_key: Tensor, pool_value: Tensor, page_N: Tensor, at_N: Tensor
) -> None:
    """Write the keys and values of texts to their places. Only a kernel reaches pages of every segment."""
    places, heads, dim = key_NHD.shape
    key_NHD, value_NHD = (x if x.stride(2) == 1 else x.contiguous() for x in (key_NHD, value_NHD))
    _keep[(places,)](
        key_NHD, value_NHD, key_NHD.stride(0), key_NHD.stride(1), value_NHD.stride(0), value_NHD.stride(1),
        pool_key, pool_value, page_N, at_N, HEADS=heads, DIM=dim, TILE=triton.next_power_of_2(heads),
        WIDTH=triton.next_power_of_2(dim), UNIT=pool_key.stride(0), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate(
    product_ptr, out_ptr, cos_ptr, sin_ptr, query_norm, key_norm, epsilon,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program per token: its queries and keys are normalised and rotated, its values only converted."""
    d = tl.arange(0, WIDTH)
    q = tl.arange(0, QUERY_TILE)
    k = tl.arange(0, KEY_TILE)
    token = tl.program_id(0).to(tl.int64)
    row = token * (QUERIES + 2 * KEYS) * DIM
    cos = tl.load(cos_ptr + token * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    there = (q < QUERIES)[:, None] & (d < DIM)[None, :]
    query = _heads(product_ptr, row, q, d, DIM, there, query_norm, epsilon, cos, sin, True, NORM)
    tl.store(out_ptr + row + q[:, None] * DIM + d[None, :], query.to(out_ptr.dtype.element_ty), mask=there)
    row += QUERIES * DIM
    there = (k < KEYS)[:, None] & (d < DIM)[None, :]
    key = _heads(product_ptr, row, k, d, DIM, there, key_norm, epsilon, cos, sin, True, NORM)
    tl.store(out_ptr + row + k[:, None] * DIM + d[None, :], key.to(out_ptr.dtype.element_ty), mask=there)
    row += KEYS * DIM
    value = tl.load(product_ptr + row + k[:, None] * DIM + d[None, :], mask=there, other=0.0)
    tl.store(out_ptr + row + k[:, None] * DIM + d[None, :], value.to(out_ptr.dtype.element_ty), mask=there)


def rotate(
    product_NX: Tensor, queries: int, keys: int, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[N, heads, D]` of `dtype`, ready to meet, from the product that holds them one after
    the other."""
    heads, (cos, sin, query_norm, key_norm, epsilon) = queries + 2 * keys, rotation
    out_NHD = torch.empty(
        len(product_NX), heads, product_NX.shape[1] // heads, dtype=dtype, device=product_NX.device
    )  # fmt: skip
    dim = out_NHD.shape[2]
    _rotate[(len(out_NHD),)](
        product_NX, out_NHD, cos, sin, out_NHD if query_norm is None else query_norm,
        out_NHD if key_norm is None else key_norm, epsilon, QUERIES=queries, KEYS=keys, DIM=dim,
        WIDTH=triton.next_power_of_2(dim), QUERY_TILE=triton.next_power_of_2(queries),
        KEY_TILE=triton.next_power_of_2(keys), NORM=query_norm is not None,
    )  # fmt: skip
    query_NHD, key_NHD, value_NHD = out_NHD.split([queries, keys, keys], dim=1)
    return query_NHD, key_NHD, value_NHD


@triton.jit
def _add_norm(x_ptr, added_ptr, weight_ptr, out_ptr, width, epsilon, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """One program per row: add to the residual stream, and normalise it."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * width + k, mask=k < width, other=0.0)
    if ADD:
        added = tl.load(added_ptr + row * width + k, mask=k < width, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * width + k, x, mask=k < width)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + k, mask=k < width, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon) * weight
    tl.store(out_ptr + row * width + k, out.to(out_ptr.dtype.element_ty), mask=k < width)


def add_norm(x_SH: Tensor, added_SH: Tensor | None, weight_H: Tensor, epsilon: float) -> Tensor:
    """Add to `x_SH` in place. Returns its root-mean-square norm in the type of the weight."""
    rows, width = x_SH.shape
    out_SH = torch.empty(rows, width, dtype=weight_H.dtype, device=x_SH.device)
    _add_norm[(rows,)](
        x_SH, out_SH if added_SH is None else added_SH, weight_H, out_SH, width, epsilon,
        ADD=added_SH is not None, WIDTH=triton.next_power_of_2(width), num_warps=4 if width < 4096 else 8,
    )  # fmt: skip
    return out_SH


@triton.jit
def _gate(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * width + n, mask=n < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + n, (gate / (1 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=n < width)


def gate(both_SN: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up` of rows that hold both, one after the other."""
    rows, width = both_SN.shape[0], both_SN.shape[1] // 2
    out_SN = torch.empty(rows, width, dtype=dtype, device=both_SN.device)
    _gate[(triton.cdiv(width, 1024), rows)](both_SN, out_SN, width, BLOCK=1024, num_warps=4)
    return out_SN


@triton.jit
def _embed(token_ptr, table_ptr, out_ptr, inner, INNER: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, INNER)
    token = tl.load(token_ptr + row)
    x = tl.load(table_ptr + token * inner + k, mask=k < inner, other=0.0)
    tl.store(out_ptr + row * inner + k, x.to(out_ptr.dtype.element_ty), mask=k < inner)


def embed(token_S: Tensor, table_VH: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding table. torch's own kernel takes ten times as long for few rows."""
    rows, inner = len(token_S), table_VH.shape[1]
    out_SH = torch.empty(rows, inner, dtype=dtype, device=token_S.device)
    _embed[(rows,)](token_S, table_VH, out_SH, inner, INNER=triton.next_power_of_2(inner))
    return out_SH


@triton.jit
def _choose(logits, uniform, vocabulary, inverse_temperature, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The first token whose cumulative probability exceeds the uniform number, and its log-probability.

    The sums of blocks tell which block holds that token; only that block is read again.
    """
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
    target = uniform * total
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
    return token, x - best - tl.log(total)


@triton.jit
def _sample(
    logits_ptr, uniform_ptr, token_ptr, logp_ptr, vocabulary, inverse_temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(uniform_ptr + row)
    token, logp = _choose(logits_ptr + row * vocabulary, uniform, vocabulary, inverse_temperature, BLOCK, BLOCKS)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, logp)


def sample(logits_SV: Tensor, uniform_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Same as `sampling.sample` over the whole distribution, in one pass over the logits plus one block of a second."""
    rows, vocabulary = logits_SV.shape
    token_S = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    logp_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    _sample[(rows,)](
        logits_SV.contiguous(), uniform_S, token_S, logp_S, vocabulary, 1.0 / temperature, **_blocks(vocabulary)
    )
    return token_S, logp_S


def _blocks(vocabulary: int) -> dict[str, int]:
    block = 4096
    return {"BLOCK": block, "BLOCKS": max(2, triton.next_power_of_2(triton.cdiv(vocabulary, block))), "num_warps": 4}


@triton.jit
def _write(
    logits_ptr, uniform_ptr, token_out, logp_out, length_out, finished_out, ends_ptr,
    token_ptr, position_ptr, step_ptr, request_ptr, alive_ptr, limit_ptr, vocabulary, longest, ends,
    inverse_temperature, ENDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per row: choose its next token, write it down, and advance the row unless it ends here."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.load(step_ptr + row)
    request = tl.load(request_ptr + row)
    alive = tl.load(alive_ptr + row)
    uniform = tl.load(uniform_ptr + request * longest + step)
    token, logp = _choose(logits_ptr + row * vocabulary, uniform, vocabulary, inverse_temperature, BLOCK, BLOCKS)
    token = token.to(tl.int64)
    e = tl.arange(0, ENDS)
    end = tl.load(ends_ptr + e, mask=e < ends, other=-1)
    ended = tl.max((end == token).to(tl.int64), 0)
    place = request * longest + step
    tl.store(token_out + place, token.to(tl.int32), mask=alive > 0)
    tl.store(logp_out + place, logp, mask=alive > 0)
    tl.store(length_out + request, step + 1, mask=alive > 0)
    tl.store(finished_out + request, ended.to(tl.int8), mask=alive > 0)
    alive = alive * (1 - ended) * (step + 1 < tl.load(limit_ptr + row)).to(tl.int64)
    tl.store(alive_ptr + row, alive)
    tl.store(token_ptr + row, token)
    tl.store(position_ptr + row, tl.load(position_ptr + row) + alive)
    tl.store(step_ptr + row, step + alive)


def write(logits_SV: Tensor, temperature: float, ends: Tensor, memory: "Memory", rows: "RowTable") -> None:
    """Sample a token for every row, write it into memory, and update the rows: the end of a step in one kernel."""
    count, vocabulary = logits_SV.shape
    _write[(count,)](
        logits_SV.contiguous(), memory.uniform_BT, memory.token_BT, memory.logp_BT, memory.length_B,
        memory.finished_B.view(torch.int8), ends,
        rows.token, rows.position, rows.step, rows.request, rows.alive, rows.limit,
        vocabulary, memory.limit, len(ends), 1.0 / temperature,
        ENDS=triton.next_power_of_2(max(1, len(ends))), **_blocks(vocabulary),
    )  # fmt: skip
