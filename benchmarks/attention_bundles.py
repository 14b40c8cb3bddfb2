#!/usr/bin/env python3
"""Attention of a decoding step on a GPU: each row reads its prompt, or one program reads it for several rows.

    python benchmarks/attention_bundles.py [--rows 512 1024 2048] [--prompt 110] [--response 64]
    TRITON_INTERPRET=1 python benchmarks/attention_bundles.py --check       without a GPU: only compare the results

The first is Solera's kernel: a program for each row and key-value head. A tile of a matrix product has 16 queries, of
which one row of SmolLM2 fills three. In the second, the rows of a group fill a tile together: a program reads the keys
of their prompt once, then those of each response. Eight rows share a prompt, as in a batch; responses have up to twice
the mean length. Prints microseconds for one layer, from a CUDA graph of 30 layers with keys and values of their own.
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


@triton.jit
def _rotated(start_ptr, cos, sin, real, DIM: tl.constexpr):
    """Vectors that begin at these places, each rotated by its row's position."""
    d = tl.arange(0, DIM)
    other = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    x = tl.load(start_ptr + d[None, :], mask=real, other=0.0).to(tl.float32)
    pair = tl.load(start_ptr + other[None, :], mask=real, other=0.0).to(tl.float32)
    return x * cos + tl.where((d < DIM // 2)[None, :], -pair, pair) * sin


@triton.jit
def _read(
    query, pool_key, pool_value, page_ptr, length, mine, scale, head, best, total, acc,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Show `length` keys, which begin on the first page, to the queries `mine`."""
    b = tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    here = tl.load(page_ptr)
    for first in range(0, length, BLOCK):
        start = here * UNIT + ((first & (PAGE - 1)) * HEADS + head) * DIM
        keys_at = start + (b * (HEADS * DIM))[:, None] + d[None, :]
        there = b < length - first
        keys = tl.load(pool_key + keys_at, mask=there[:, None], other=0.0)
        values = tl.load(pool_value + keys_at, mask=there[:, None], other=0.0)
        seen = there[None, :] & mine[:, None]
        best, total, acc = _see(query, keys, values, seen, scale, best, total, acc, "tf32")
        here = tl.load(page_ptr + (first + BLOCK) // PAGE, mask=first + BLOCK < length, other=0)
    return best, total, acc


@triton.jit
def _attend_in_bundles(
    query_ptr, key_ptr, value_ptr, query_row, key_row, value_row, pool_key, pool_value, out_ptr,
    bundle_ptr, page_ptr, page_row, prompt_length, response_length, alive_ptr, scale, cos_ptr, sin_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per bundle of rows with one prompt and key-value head."""
    head = tl.program_id(0)
    bundle = bundle_ptr + tl.program_id(1) * MEMBERS
    leader = tl.load(bundle)
    if leader < 0:
        return
    line = tl.arange(0, TILE)
    member = line // GROUP
    g = line % GROUP
    d = tl.arange(0, DIM)
    row = tl.load(bundle + member, mask=member < MEMBERS, other=-1)
    real = (row >= 0)[:, None]
    turn = tl.load(prompt_length + leader).to(tl.int32)
    cos = tl.load(cos_ptr + row[:, None] * DIM + d[None, :], mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row[:, None] * DIM + d[None, :], mask=real, other=0.0).to(tl.float32)
    query = _rotated(query_ptr + row[:, None] * query_row + (head * GROUP + g)[:, None] * DIM, cos, sin, real, DIM)
    key = _rotated(key_ptr + row[:, None] * key_row + head * DIM, cos, sin, real, DIM)
    query, key = query.to(pool_key.dtype.element_ty), key.to(pool_key.dtype.element_ty)
    value = tl.load(value_ptr + row[:, None] * value_row + head * DIM + d[None, :], mask=real, other=0.0)
    value = value.to(pool_value.dtype.element_ty)
    best = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
    total = tl.full([TILE], 1.0, tl.float32)
    acc = value.to(tl.float32)
    prompt = page_ptr + leader * page_row
    best, total, acc = _read(
        query, pool_key, pool_value, prompt, turn, row >= 0, scale, head, best, total, acc,
        HEADS, DIM, PAGE, UNIT, BLOCK,
    )  # fmt: skip
    column = (turn + PAGE - 1) // PAGE
    for m in tl.static_range(MEMBERS):
        own = tl.load(bundle + m)
        going = tl.load(alive_ptr + own, mask=own >= 0, other=0) > 0
        length = tl.where(going, tl.load(response_length + own, mask=own >= 0, other=0), 0).to(tl.int32)
        pages = page_ptr + tl.maximum(own, 0) * page_row + column
        best, total, acc = _read(
            query, pool_key, pool_value, pages, length, member == m, scale, head, best, total, acc,
            HEADS, DIM, PAGE, UNIT, BLOCK,
        )  # fmt: skip
    written = tl.load(response_length + row, mask=row >= 0, other=0)
    newest = tl.load(page_ptr + row * page_row + column + written // PAGE, mask=row >= 0, other=0)
    place = newest[:, None] * UNIT + ((written % PAGE) * HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(pool_key + place, key, mask=real & (g == 0)[:, None])
    tl.store(pool_value + place, value, mask=real & (g == 0)[:, None])
    out = (row * HEADS * GROUP + head * GROUP + g)[:, None] * DIM + d[None, :]
    tl.store(out_ptr + out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


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

    def in_bundles(self, bundle_KM: Tensor, block: int, warps: int, stages: int) -> Tensor:
        out_SHD = torch.empty(self.query_SHD.shape, dtype=self.query_SHD.dtype, device=self.query_SHD.device)
        _attend_in_bundles[(HEADS, len(bundle_KM))](
            self.query_SHD, self.key_SHD, self.value_SHD, self.query_SHD.stride(0), self.key_SHD.stride(0),
            self.value_SHD.stride(0), *self.pools, out_SHD, bundle_KM, self.page_SP, self.page_SP.stride(0),
            self.prompt_S, self.response_S, self.alive_S, DIM**-0.5, self.cos_SD, self.sin_SD,
            HEADS=HEADS, GROUP=QUERIES // HEADS, MEMBERS=bundle_KM.shape[1],
            TILE=max(16, triton.next_power_of_2(bundle_KM.shape[1] * QUERIES // HEADS)), DIM=DIM, PAGE=PAGE,
            UNIT=self.pools[0].stride(0), BLOCK=block, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out_SHD


def check(device: str, dtype: torch.dtype, rows: int, prompt: int, response: int) -> None:
    for members, block in itertools.product((2, 4, 5, 8), (32, 64)):
        step, other = (Step(rows, prompt, response, device, dtype, seed=1) for _ in range(2))
        for name, value in vars(step).items():
            setattr(other, name, tuple(x.clone() for x in value) if isinstance(value, tuple) else value)
        step.alive_S[3] = 0
        alive = step.alive_S > 0
        wanted, got = step.as_now(), other.in_bundles(other.bundles(members), block, 1, 2)
        torch.testing.assert_close(got[alive], wanted[alive], atol=2e-3, rtol=2e-3)
        for one, both in zip(step.pools, other.pools, strict=True):
            torch.testing.assert_close(both, one)
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
        for members, block, (warps, stages) in itertools.product(
            (2, 4, 5, 8), (32, 64), ((1, 2), (1, 3), (2, 3), (4, 3))
        ):
            bundle_KM = steps[0].bundles(members)
            took = microseconds([partial(step.in_bundles, bundle_KM, block, warps, stages) for step in steps])
            print(
                f"  {members} rows, blocks of {block}, {warps} warps, {stages} stages: {took:.1f} ({took / now:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
