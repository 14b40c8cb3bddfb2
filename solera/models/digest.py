"""Short names for the values of tensors, so that two sides can tell whether they hold the same bits."""

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, reduce
from itertools import accumulate, islice

import torch
from torch import Tensor

from solera.records import TensorSpec

BLOCK = 1 << 22
"""Elements of a block, each with a weight of its own; on a CPU, what is summed at once and so bounds the memory."""
GPU_BUNDLE = 1 << 28
"""Elements summed at once on a GPU, where that takes no memory: what bounds the tensors that were cast for it."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _CARRY = -0x61C8864680B583EB, 0x5851F42D4C957F2D
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


@torch.no_grad()
def describe(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Name, shape, dtype and digest of each tensor; all digests leave their device together.

    A digest is `Σ_c K^(C−c)·Σ_n w_n·x_{c,n}` mod 2⁶⁴, over blocks c of the raw bits x as integers, with fixed odd
    weights w. A change of one element always shows (odd numbers have an inverse mod 2⁶⁴). Of other damage and of any
    exchange of elements that knows nothing of the weights, one case in 2⁶³ does not, but one in 2³² where of 32-bit
    numbers nothing but signs changed. It guards against accidents, not against forgery.
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


def locate(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """The same for tensors in memory that both sides share: where they lie stands for what they hold."""
    return tuple(TensorSpec(name, tuple(t.shape), _name(t.dtype), t.data_ptr()) for name, t in named)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype)


def _carry(total: int, new: int) -> int:
    return (total * _CARRY + new) % 2**64


def _bundles(blocks: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Blocks in their order, as many together as there is memory for: small tensors are summed in one go."""
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
    """`Σ_n w_n·x_n` of each block; whole numbers wrap round, so differences of running sums are exact."""
    device, lengths = bundle[0].device, tuple(map(Tensor.numel, bundle))
    if device.type == "cuda":
        from solera.models import kernels  # triton is there only where a GPU is

        return kernels.weighted_sums([block.contiguous() for block in bundle], _weights(device))
    ends, weight_N = _ends(device, lengths), _weights_of(device, lengths)
    whole_N = torch.cat([bundle[0].new_zeros(1), *(block.reshape(-1) for block in bundle)])
    bits_N = whole_N.view(_INTEGERS[whole_N.element_size()])
    return bits_N.to(torch.int64).mul_(weight_N).cumsum_(0)[ends].diff()


@lru_cache(maxsize=4096)
def _ends(device: torch.device, lengths: tuple[int, ...]) -> Tensor:
    """Where each block of a bundle ends after a zero."""
    return torch.tensor([0, *accumulate(lengths)], device=device)


@lru_cache(maxsize=1)
def _weights_of(device: torch.device, lengths: tuple[int, ...]) -> Tensor:
    """The elements' weights after a zero's; a small model is one bundle always."""
    weight_N = _weights(device)
    return torch.cat([weight_N[:length] for length in (1, *lengths)])


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers that look random: shift and multiply, twice, over multiples of the golden ratio (SplitMix64)."""
    state_N = torch.arange(1, BLOCK + 1, device=device) * _GOLDEN
    for factor in _MIX:
        state_N = (state_N ^ (state_N >> 29)) * factor
    return state_N | 1
