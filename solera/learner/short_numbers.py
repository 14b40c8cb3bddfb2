"""Numbers in 16 and 8 bits, rounded at random so that their expected value is exact.

Stochastic rounding picks one of the two neighbours of a number. The upper one has probability (number − lower) / (upper
− lower). A change that is much smaller than the distance of two neighbours is then made now and then, and on average in
full. Rounding to the nearest would always lose it.
"""

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale."""
NOISE_BITS = 20
"""Bits of a float32 that an 8-bit code leaves out. Of 23 bits after the binary point, 3 remain."""
TOP = 1.875
"""The largest number of a block, divided by its scale: 1.111 in binary."""
NEGLIGIBLE = 2.0**-100
"""A block whose largest number is below this is stored as zeros. AdamW adds 1e-8 to the root of the second moment,
which is far larger."""
SIGNED, UNSIGNED = 127, 255
"""The largest code of a magnitude: with a sign there are 7 bits for it, otherwise 8."""
SMALLEST = {SIGNED: 1.125 * 2.0**-15, UNSIGNED: 1.125 * 2.0**-31}
"""What code 1 stands for, divided by the scale of its block."""


def to_bfloat16(number: Tensor, noise: Tensor) -> Tensor:
    """Round float32 numbers stochastically. `noise` are integers; their lowest 16 bits must be uniform.

    Numbers that bfloat16 can hold, infinities and NaN stay as they are.
    """
    bits = number.view(torch.int32) + (noise & 0xFFFF).to(torch.int32)
    rounded = (bits & -0x10000).view(torch.float32)
    return torch.where(number.isfinite(), rounded, number).to(torch.bfloat16)


def encode(number_NB: Tensor, noise_NB: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes `[N, B]` and the scale of each block `[N, 1]`. `largest` is SIGNED or UNSIGNED.

    A code is a small float: 3 bits after the binary point and 4 (signed) or 5 bits of exponent. The largest number of a
    block is stored exactly. Codes below the smallest are rounded stochastically to it or to 0; unsigned ones always to
    the smallest, because a second moment of 0 would make a huge step. The lowest 20 bits of `noise_NB` must be uniform.
    """
    size_NB = number_NB.abs()
    most_N1 = size_NB.amax(1, keepdim=True)
    scale_N1 = torch.where(most_N1 >= NEGLIGIBLE, most_N1 / TOP, 0.0)
    ratio_NB = torch.where(scale_N1 > 0, size_NB / scale_N1, 0.0).clamp(max=TOP)
    noise_NB = (noise_NB & (2**NOISE_BITS - 1)).to(torch.int32)
    code_NB = ((ratio_NB.view(torch.int32) + noise_NB) >> NOISE_BITS) - _offset(largest)
    smallest = SMALLEST[largest]
    drawn_NB = noise_NB < ratio_NB * (2**NOISE_BITS / smallest) if largest == SIGNED else ratio_NB > 0
    code_NB = torch.where(ratio_NB < smallest, drawn_NB.to(torch.int32), code_NB)
    if largest == SIGNED:
        code_NB = code_NB + (number_NB < 0) * (SIGNED + 1)
    return code_NB.to(torch.uint8), scale_N1


def decode(code_NB: Tensor, scale_N1: Tensor, largest: int) -> Tensor:
    """The float32 numbers of the codes that `encode` returned."""
    code_NB = code_NB.to(torch.int32)
    size_NB = code_NB & largest
    value_NB = ((size_NB + _offset(largest)) << NOISE_BITS).view(torch.float32) * scale_N1
    return torch.where(size_NB == 0, 0.0, torch.where(code_NB > largest, -value_NB, value_NB))


def _offset(largest: int) -> int:
    """What lies between a code and the upper bits of the float32 that it stands for: TOP has the largest code."""
    return 0x3FF - largest
