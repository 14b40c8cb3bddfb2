"""Short names for the values of tensors, so that two sides can tell whether they hold the same bits."""

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, reduce
from itertools import accumulate, islice

import torch
from torch import Tensor

from solera.records import TensorSpec

BLOCK = 1 << 22
"""Elements summed at once: what bounds the memory beside the tensors themselves."""
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
            flat_N = tensor.reshape(-1)
            several = flat_N.split(BLOCK) if flat_N.numel() > BLOCK else (flat_N,)
            facts.append((name, tuple(tensor.shape), str(tensor.dtype), len(several)))
            yield from several

    sums = [_sums(bundle) for bundle in _bundles(blocks())]
    numbers = iter(torch.cat(sums).tolist() if sums else ())
    return tuple(
        TensorSpec(name, shape, dtype, reduce(_carry, islice(numbers, count), 0)) for name, shape, dtype, count in facts
    )


def locate(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """The same for tensors in memory that both sides share: where they lie stands for what they hold."""
    return tuple(TensorSpec(name, tuple(t.shape), str(t.dtype), t.data_ptr()) for name, t in named)


def _carry(total: int, new: int) -> int:
    return (total * _CARRY + new) % 2**64


def _bundles(blocks: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Blocks in their order, as many together as one block may hold: small tensors are summed in one go."""
    bundle, held = list[Tensor](), 0
    for block_N in blocks:
        if bundle and (held + block_N.numel() > BLOCK or block_N.dtype != bundle[0].dtype):
            yield bundle
            bundle, held = [], 0
        bundle.append(block_N)
        held += block_N.numel()
    if bundle:
        yield bundle


def _sums(bundle: list[Tensor]) -> Tensor:
    """`Σ_n w_n·x_n` of each block; whole numbers wrap round, so differences of running sums are exact."""
    lengths = tuple(map(Tensor.numel, bundle))
    ends, weight_N = _ends(bundle[0].device, lengths), _weights_of(bundle[0].device, lengths)
    whole_N = torch.cat([bundle[0].new_zeros(1), *bundle])
    bits_N = whole_N.view(_INTEGERS[whole_N.element_size()])
    return bits_N.to(torch.int64).mul_(weight_N).cumsum_(0)[ends].diff()


@lru_cache(maxsize=4096)
def _ends(device: torch.device, lengths: tuple[int, ...]) -> Tensor:
    """Where each block of a bundle ends after a zero. Kept, since a GPU would be waited for at every new one."""
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
