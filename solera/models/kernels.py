"""A Triton kernel over many tensors at once: the weighted sums of their bits that digests are made of."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16_384
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _sum_tile(
    address_ptr, length_ptr, block_ptr, start_ptr, weight_ptr, sum_ptr,
    INTEGER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program a tile of a block; whole numbers wrap round, so the order of additions does not matter."""
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
    """`Σ_n w_n·x_n` mod 2⁶⁴ of each contiguous block, all of one type and none longer than the weights."""
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
    """Kept, since a GPU would be waited for at every new one."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
