"""Digests of tensors, so that two sides can tell whether they hold the same bits."""

from collections.abc import Iterable, Iterator
from functools import cache, reduce
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.records import TensorSpec

BLOCK = 1 << 22
"""Elements of a block, each with its own weight. On a CPU, this is summed at once and so limits the memory."""
GPU_BUNDLE = 1 << 28
"""Elements summed at once on a GPU. Summing needs no memory there; this limits the size of tensors that were cast for
it."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _CARRY = -0x61C8864680B583EB, 0x5851F42D4C957F2D
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


@torch.no_grad()
def describe(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Return name, shape, dtype and digest of each tensor. All digests leave their device together.

    A digest is `Σ_c K^(C−c)·Σ_n w_n·x_{c,n}` mod 2⁶⁴, over blocks c of the raw bits x as integers, with fixed odd
    weights w. A change of one element always changes the digest (odd numbers are invertible mod 2⁶⁴). Other damage,
    including swapped elements, goes unnoticed in one case in 2⁶³; if only signs of 32-bit numbers changed, in one case
    in 2³². The digest protects against accidents, not against forgery.
    """
    facts: list[tuple[str, tuple[int, ...], str, int]] = []

    def blocks() -> Iterator[Tensor]:
        for name, tensor in named:
            several = tensor.reshape(-1).split(BLOCK) if tensor.numel() > BLOCK else (tensor,)
            facts.append((name, tuple(tensor.shape), _name(tensor.dtype), len(several)))
            yield from several

    sums = [_sums(bundle) for bundle in _bundles(blocks())]
    numbers = iter(torch.cat(sums).tolist() if sums else ())
    return tuple(
        TensorSpec(name, shape, dtype, reduce(_carry, islice(numbers, count), 0)) for name, shape, dtype, count in facts
    )


def digest_of(specs: Iterable[TensorSpec]) -> str:
    """One digest of all these tensors, whatever their order."""
    return blake2b(repr(sorted(specs)).encode(), digest_size=8).hexdigest()


def locate(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """The same for tensors in memory that both sides share: their address replaces the digest of their values."""
    return tuple(TensorSpec(name, tuple(t.shape), _name(t.dtype), t.data_ptr()) for name, t in named)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype)


def _carry(total: int, new: int) -> int:
    return (total * _CARRY + new) % 2**64


def _bundles(blocks: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Blocks in order, bundled as far as memory allows, so that small tensors are summed together."""
    bundle, held = list[Tensor](), 0
    for block in blocks:
        length, limit = block.numel(), GPU_BUNDLE if block.is_cuda else BLOCK
        if bundle and (held + length > limit or block.dtype != bundle[0].dtype):
            yield bundle
            bundle, held = [], 0
        bundle.append(block)
        held += length
    if bundle:
        yield bundle


def _sums(bundle: list[Tensor]) -> Tensor:
    """`Σ_n w_n·x_n` of each block. Integers wrap around."""
    device, lengths = bundle[0].device, tuple(map(Tensor.numel, bundle))
    if device.type == "cuda":
        from solera.models import kernels  # triton is installed only with a GPU

        return kernels.weighted_sums([block.contiguous() for block in bundle], _weights(device))
    count = 1 << max(1, *lengths).bit_length()  # a power of two, so that few sizes are kept; a small model needs few
    weight_N = _weights(device, min(count, BLOCK)).numpy()
    return torch.tensor([int(np.einsum("n,n", bits_N, weight_N[: len(bits_N)])) for bits_N in map(_bits, bundle)])


def _bits(block: Tensor) -> npt.NDArray[Any]:
    flat_N = block.detach().reshape(-1)
    return flat_N.view(_INTEGERS[flat_N.element_size()]).numpy()


@cache
def _weights(device: torch.device, count: int = BLOCK) -> Tensor:
    """Odd pseudo-random numbers: shift and multiply, twice, over multiples of the golden ratio (SplitMix64)."""
    state_N = torch.arange(1, count + 1, device=device) * _GOLDEN
    for factor in _MIX:
        state_N = (state_N ^ (state_N >> 29)) * factor
    return state_N | 1
