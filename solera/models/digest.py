"""Short names for the values of tensors, so that two sides can tell whether they hold the same bits."""

from collections.abc import Iterable
from functools import cache, reduce

import torch
from torch import Tensor

from solera.records import TensorSpec

BLOCK = 1 << 20
"""Elements summed at once: what bounds the memory beside the tensor itself."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _CARRY = -0x61C8864680B583EB, 0x5851F42D4C957F2D
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def describe(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Name, shape, dtype and digest of each tensor; all digests leave their device together."""
    facts, sums = list[tuple[str, tuple[int, ...], str]](), list[Tensor]()
    for name, tensor in named:
        facts.append((name, tuple(tensor.shape), str(tensor.dtype)))
        sums.append(_digest(tensor, _weights(tensor.device)))
    digests = torch.stack(sums).tolist() if sums else []
    return tuple(TensorSpec(*fact, digest) for fact, digest in zip(facts, digests, strict=True))


def _digest(tensor: Tensor, weight_N: Tensor) -> Tensor:
    """`Σ_c K^(C−c)·Σ_n w_n·x_{c,n}` mod 2⁶⁴, over blocks c of the raw bits x as integers, with fixed odd weights w.

    A change of one element always shows (odd numbers have an inverse mod 2⁶⁴). Of other damage and of any exchange of
    elements that knows nothing of the weights, one case in 2⁶³ does not, but one in 2³² where of 32-bit numbers nothing
    but signs changed. It guards against accidents, not against forgery.
    """
    bits_N = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    sums = ((block_N * weight_N[: len(block_N)]).sum() for block_N in bits_N.split(BLOCK))
    return reduce(lambda total, new: total * _CARRY + new, sums)


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers that look random: shift and multiply, twice, over multiples of the golden ratio (SplitMix64)."""
    state_N = torch.arange(1, BLOCK + 1, device=device) * _GOLDEN
    for factor in _MIX:
        state_N = (state_N ^ (state_N >> 29)) * factor
    return state_N | 1
