#!/usr/bin/env python3
"""Attention of a decoding step on a GPU: each row reads its prompt and its response, or some programs read the prompts.

    python benchmarks/attention_parts.py [--rows 512 1024 2048] [--prompt 110] [--response 64]
    TRITON_INTERPRET=1 python benchmarks/attention_parts.py --check         without a GPU: only compare the results

The first is Solera's kernel: a program for each row and key-value head, which reads the prompt of a group once for
each of its rows. The second has two kinds of programs, in one launch: some read a prompt for several rows of its group,
whose queries fill a tile together, others read the response of one row. Whichever of a row's two programs ends last
adds up both parts. Eight rows share a prompt, as in a batch; responses have up to twice the mean length. Prints
microseconds for one layer, from a CUDA graph of 30 layers with keys and values of their own.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from solera.engines.kernels import Rotation, _see, decode_attention

HEADS, QUERIES, DIM, PAGE, GROUP = 3, 9, 64, 128, 8
NOTHING = tl.constexpr(-1e30)
"""The largest score of no keys."""


@triton.jit
def _rotated(start_ptr, cos, sin, real, DIM: tl.constexpr):
    """Vectors that begin at these places, each rotated by its row's position."""
    d = tl.arange(0, DIM)
    other = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    x = tl.load(start_ptr + d[None, :], mask=real, other=0.0).to(tl.float32)
    pair = tl.load(start_ptr + other[None, :], mask=real, other=0.0).to(tl.float32)
    return x * cos + tl.where((d < DIM // 2)[None, :], -pair, pair) * sin


@triton.jit
def _angles(cos_ptr, sin_ptr, row, real, DIM: tl.constexpr):
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    cos = tl.load(cos_ptr + at, mask=real, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _read(
    query, pool_key, pool_value, page_ptr, length, scale, head, best, total, acc,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Show the queries `length` keys, which begin on the first page."""
    b = tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    here = tl.load(page_ptr)
    for first in range(0, length, BLOCK):
        start = tl.multiple_of(here * UNIT + ((first & (PAGE - 1)) * HEADS + head) * DIM, DIM)
        keys_at = start + (b * (HEADS * DIM))[:, None] + d[None, :]
        there = b < length - first
        keys = tl.load(pool_key + keys_at, mask=there[:, None], other=0.0)
        values = tl.load(pool_value + keys_at, mask=there[:, None], other=0.0)
        best, total, acc = _see(query, keys, values, there[None, :], scale, best, total, acc, "tf32")
        here = tl.load(page_ptr + (first + BLOCK) // PAGE, mask=first + BLOCK < length, other=0)
    return best, total, acc


@triton.jit
def _leave(part_ptr, line, best, total, acc, real, DIM: tl.constexpr):
    """Write a part where the other program of the row finds it."""
    d = tl.arange(0, DIM)
    tl.store(part_ptr + line * (DIM + 2), best, mask=real)
    tl.store(part_ptr + line * (DIM + 2) + 1, total, mask=real)
    tl.store(part_ptr + (line * (DIM + 2) + 2)[:, None] + d[None, :], acc, mask=real[:, None])


@triton.jit
def _add_up(part_ptr, line, best, total, acc, real, out_ptr, DIM: tl.constexpr):
    """Add the other program's part, and write the result."""
    d = tl.arange(0, DIM)
    best_2 = tl.load(part_ptr + line * (DIM + 2), mask=real, other=0.0, cache_modifier=".cg")
    total_2 = tl.load(part_ptr + line * (DIM + 2) + 1, mask=real, other=1.0, cache_modifier=".cg")
    at = (line * (DIM + 2) + 2)[:, None] + d[None, :]
    acc_2 = tl.load(part_ptr + at, mask=real[:, None], other=0.0, cache_modifier=".cg")
    most = tl.maximum(best, best_2)
    mine, others = tl.exp(best - most), tl.exp(best_2 - most)
    found = (acc * mine[:, None] + acc_2 * others[:, None]) / (total * mine + total_2 * others)[:, None]
    tl.store(out_ptr + line[:, None] * DIM + d[None, :], found.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def _read_prompt(
    query_ptr, query_row, pool_key, pool_value, out_ptr, bundle_ptr, page_ptr, page_row, prompt_length, alive_ptr,
    scale, cos_ptr, sin_ptr, own_part, other_part, arrived_ptr, number, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The queries of a bundle's rows against their prompt."""
    n = tl.arange(0, TILE)
    g = n % GROUP
    leader = tl.load(bundle_ptr + number * MEMBERS)
    row = tl.load(bundle_ptr + number * MEMBERS + n // GROUP, mask=n < MEMBERS * GROUP, other=-1)
    real = row >= 0
    cos, sin = _angles(cos_ptr, sin_ptr, row, real[:, None], DIM)
    at = query_ptr + row[:, None] * query_row + (head * GROUP + g)[:, None] * DIM
    query = _rotated(at, cos, sin, real[:, None], DIM).to(pool_key.dtype.element_ty)
    best = tl.full([TILE], NOTHING, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIM], tl.float32)
    going = tl.max(tl.load(alive_ptr + row, mask=real, other=0), 0) > 0
    length = tl.where(going, tl.load(prompt_length + leader), 0).to(tl.int32)
    best, total, acc = _read(
        query, pool_key, pool_value, page_ptr + leader * page_row, length, scale, head, best, total, acc,
        HEADS, DIM, PAGE, UNIT, BLOCK,
    )  # fmt: skip
    line = (row * HEADS + head) * GROUP + g
    _leave(own_part, line, best, total, acc, real, DIM)
    tl.debug_barrier()
    first = real & (g == 0)
    before = tl.atomic_add(arrived_ptr + row * HEADS + head, 1, mask=first, sem="acq_rel")
    tl.debug_barrier()
    same = (n[:, None] // GROUP == n[None, :] // GROUP) & first[None, :]
    last = real & (tl.sum(tl.where(same, before[None, :], 0), 1) == 1)
    _add_up(other_part, line, best, total, acc, last, out_ptr, DIM)
    tl.store(arrived_ptr + row * HEADS + head, 0, mask=last & (g == 0))


@triton.jit
def _read_response(
    query_ptr, key_ptr, value_ptr, query_row, key_row, value_row, pool_key, pool_value, out_ptr,
    page_ptr, page_row, prompt_length, response_length, alive_ptr, scale, cos_ptr, sin_ptr,
    own_part, other_part, arrived_ptr, number, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The queries of a row against its new token and its response so far."""
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM)
    row = tl.zeros([TILE], tl.int64) + number
    real = n < GROUP
    cos, sin = _angles(cos_ptr, sin_ptr, row, real[:, None], DIM)
    at = query_ptr + row[:, None] * query_row + (head * GROUP + n)[:, None] * DIM
    query = _rotated(at, cos, sin, real[:, None], DIM).to(pool_key.dtype.element_ty)
    key = _rotated(key_ptr + row[:, None] * key_row + head * DIM, cos, sin, real[:, None], DIM)
    key = key.to(pool_key.dtype.element_ty)
    value = tl.load(value_ptr + row[:, None] * value_row + head * DIM + d[None, :], mask=real[:, None], other=0.0)
    value = value.to(pool_value.dtype.element_ty)
    best = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
    total = tl.full([TILE], 1.0, tl.float32)
    acc = value.to(tl.float32)
    written = tl.load(response_length + number).to(tl.int32)
    turn = tl.load(prompt_length + number).to(tl.int32)
    pages = page_ptr + number * page_row + (turn + PAGE - 1) // PAGE
    length = tl.where(tl.load(alive_ptr + number) > 0, written, 0)
    best, total, acc = _read(
        query, pool_key, pool_value, pages, length, scale, head, best, total, acc, HEADS, DIM, PAGE, UNIT, BLOCK
    )
    newest = tl.load(pages + written // PAGE)
    place = newest * UNIT + ((written % PAGE) * HEADS + head) * DIM + d
    tl.store(pool_key + place[None, :] + n[:, None] * 0, key, mask=(n == 0)[:, None])
    tl.store(pool_value + place[None, :] + n[:, None] * 0, value, mask=(n == 0)[:, None])
    line = (row * HEADS + head) * GROUP + n
    _leave(own_part, line, best, total, acc, real, DIM)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + number * HEADS + head, 1, sem="acq_rel")
    tl.debug_barrier()
    last = real & (tl.zeros([TILE], tl.int32) + before == 1)
    _add_up(other_part, line, best, total, acc, last, out_ptr, DIM)
    tl.store(arrived_ptr + row * HEADS + head, 0, mask=last & (n == 0))


@triton.jit
def _attend_in_parts(
    query_ptr, key_ptr, value_ptr, query_row, key_row, value_row, pool_key, pool_value, out_ptr,
    bundle_ptr, bundles, rows, page_ptr, page_row, prompt_length, response_length, alive_ptr, scale, cos_ptr, sin_ptr,
    prompt_part, response_part, arrived_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, PROMPT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    PROMPTS_FIRST: tl.constexpr,
):  # fmt: skip
    """A program per bundle of rows with one prompt and head, and one per row and head. Every row is in one bundle."""
    head = tl.program_id(0)
    number = tl.program_id(1)
    if PROMPTS_FIRST:
        reads_prompt = number < bundles
        row = number - bundles
        bundle = number
    else:
        reads_prompt = number >= rows
        row = number
        bundle = number - rows
    if reads_prompt:
        _read_prompt(
            query_ptr, query_row, pool_key, pool_value, out_ptr, bundle_ptr, page_ptr, page_row, prompt_length,
            alive_ptr, scale, cos_ptr, sin_ptr, prompt_part, response_part, arrived_ptr, bundle, head,
            HEADS, GROUP, MEMBERS, TILE, DIM, PAGE, UNIT, PROMPT_BLOCK,
        )  # fmt: skip
    else:
        _read_response(
            query_ptr, key_ptr, value_ptr, query_row, key_row, value_row, pool_key, pool_value, out_ptr,
            page_ptr, page_row, prompt_length, response_length, alive_ptr, scale, cos_ptr, sin_ptr,
            response_part, prompt_part, arrived_ptr, row, head,
            HEADS, GROUP, TILE, DIM, PAGE, UNIT, BLOCK,
        )  # fmt: skip


class Step:
    """The inputs of one layer's attention: rows in groups of eight with one prompt, and their responses so far."""

    def __init__(self, rows: int, prompt: int, response: int, device: str, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        groups, per_prompt = -(-rows // GROUP), -(-prompt // PAGE)
        self.response_S = torch.randint(0, 2 * response + 1, (rows,), generator=generator).to(device)
        self.prompt_S = torch.full((rows,), prompt, device=device)
        self.alive_S = torch.ones(rows, dtype=torch.int64, device=device)
        pages = groups * per_prompt + rows * (2 * response // PAGE + 1)
        order = torch.randperm(pages, generator=generator)
        of_prompt, of_rows = order[: groups * per_prompt], order[groups * per_prompt :]
        group_S = torch.arange(rows) // GROUP
        table = torch.cat([of_prompt.view(groups, -1)[group_S], of_rows.view(rows, -1)], 1)
        self.page_SP = torch.nn.functional.pad(table, (0, 1)).to(device)
        self.pools = tuple(torch.randn(pages, PAGE, HEADS, DIM, dtype=dtype, device=device) for _ in range(2))
        width = (QUERIES + 2 * HEADS) * DIM
        product_SN = torch.randn(rows, width, dtype=dtype, device=device)
        parts = product_SN.split([QUERIES * DIM, HEADS * DIM, HEADS * DIM], 1)
        self.query_SHD, self.key_SHD, self.value_SHD = (part.unflatten(1, (-1, DIM)) for part in parts)
        angle_SD = torch.rand(rows, DIM // 2, device=device).repeat(1, 2)
        self.cos_SD, self.sin_SD = angle_SD.cos().to(dtype), angle_SD.sin().to(dtype)
        self.parts = tuple(torch.zeros(rows * QUERIES * (DIM + 2), device=device) for _ in range(2))
        self.arrived = torch.zeros(rows * HEADS, dtype=torch.int32, device=device)

    def as_now(self) -> Tensor:
        return decode_attention(
            self.query_SHD, self.key_SHD, self.value_SHD, *self.pools, self.page_SP, self.prompt_S, self.response_S,
            self.alive_S, DIM**-0.5, Rotation(self.cos_SD, self.sin_SD),
        )  # fmt: skip

    def bundles(self, members: int) -> Tensor:
        """Rows of a group, `members` to a line, then -1. `[K, M]`"""
        group_GR = torch.arange(len(self.prompt_S)).view(-1, GROUP)
        padded = torch.nn.functional.pad(group_GR, (0, -GROUP % members), value=-1)
        return padded.reshape(-1, members).to(self.page_SP.device)

    def in_parts(
        self, bundle_KM: Tensor, prompt_block: int, block: int, warps: int, stages: int, prompts_first: bool
    ) -> Tensor:
        out_SHD = torch.empty(self.query_SHD.shape, dtype=self.query_SHD.dtype, device=self.query_SHD.device)
        bundles, members = bundle_KM.shape
        _attend_in_parts[(HEADS, bundles + len(self.prompt_S))](
            self.query_SHD, self.key_SHD, self.value_SHD, self.query_SHD.stride(0), self.key_SHD.stride(0),
            self.value_SHD.stride(0), *self.pools, out_SHD, bundle_KM, bundles, len(self.prompt_S), self.page_SP,
            self.page_SP.stride(0), self.prompt_S, self.response_S, self.alive_S, DIM**-0.5, self.cos_SD, self.sin_SD,
            *self.parts, self.arrived,
            HEADS=HEADS, GROUP=QUERIES // HEADS, MEMBERS=members,
            TILE=max(16, triton.next_power_of_2(members * QUERIES // HEADS)), DIM=DIM, PAGE=PAGE,
            UNIT=self.pools[0].stride(0), PROMPT_BLOCK=prompt_block, BLOCK=block, PROMPTS_FIRST=prompts_first,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out_SHD


def check(device: str, dtype: torch.dtype, rows: int, prompt: int, response: int) -> None:
    for members, (prompt_block, block), first in itertools.product((4, 5, 8), ((64, 32), (32, 64)), (True, False)):
        step, other = (Step(rows, prompt, response, device, dtype, seed=1) for _ in range(2))
        for name, value in vars(step).items():
            setattr(other, name, tuple(x.clone() for x in value) if isinstance(value, tuple) else value)
        step.alive_S[3] = 0
        alive = step.alive_S > 0
        wanted, got = step.as_now(), other.in_parts(other.bundles(members), prompt_block, block, 1, 2, first)
        torch.testing.assert_close(got[alive], wanted[alive], atol=2e-3, rtol=2e-3)
        for one, both in zip(step.pools, other.pools, strict=True):
            torch.testing.assert_close(both, one)
        assert not other.arrived.any(), "a program did not arrive"
    print(f"both give the same: {rows} rows, prompts of {prompt}, responses of {response} tokens on average")


def microseconds(run: Sequence[Callable[[], Tensor]]) -> float:
    """For one of these calls, replayed as one graph; the median of 20."""
    for call in run:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in run]
    found = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1000 / len(kept))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--prompt", type=int, default=110)
    parser.add_argument("--response", type=int, default=64, help="mean tokens of a response so far")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="compare the results of small steps and stop")
    given = parser.parse_args()
    if given.check:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for rows, prompt, response in ((16, 110, 64), (8, 0, 20), (8, 129, 130), (8, 128, 1)):
            check(device, torch.float16, rows, prompt, response)
        return
    for rows in given.rows:
        steps = [Step(rows, given.prompt, given.response, "cuda", torch.float16, seed) for seed in range(given.layers)]
        now = microseconds([step.as_now for step in steps])
        print(f"{rows} rows: {now:.1f} us a layer as it is", flush=True)
        for members, (prompt_block, block), (warps, stages), first in itertools.product(
            (4, 5), ((32, 32), (64, 32), (64, 64)), ((1, 3), (2, 2)), (True, False)
        ):
            bundle_KM = steps[0].bundles(members)
            took = microseconds(
                [partial(step.in_parts, bundle_KM, prompt_block, block, warps, stages, first) for step in steps]
            )
            print(
                f"  {members} rows, blocks of {prompt_block} and {block}, {warps} warps, {stages} stages, "
                f"{'prompts' if first else 'responses'} first: {took:.1f} ({took / now:.2f})",
                flush=True,
            )
            got = steps[0].in_parts(bundle_KM, prompt_block, block, warps, stages, first)
            torch.testing.assert_close(got, steps[0].as_now(), atol=2e-3, rtol=2e-3)
            assert not steps[0].arrived.any(), "a program did not arrive"


if __name__ == "__main__":
    main()
