"""Stochastic rounding to 16 and 8 bits: the neighbours, the exact expected value, and the bounds of the error."""

import math

import numpy as np
import pytest
import torch

from solera.learner.short_numbers import NEGLIGIBLE, SIGNED, UNSIGNED, decode, encode, to_bfloat16

ALL_16 = torch.arange(2**16)
ALL_20 = torch.arange(2**20)
LARGEST_BFLOAT16 = (2 - 2**-7) * 2.0**127


def float32(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def neighbours(number: float) -> tuple[float, float, float]:
    """The bfloat16 numbers around `number` by the definition of the format (8 significant bits, exponents from −126),
    and how far `number` is from the first to the second."""
    exponent = max(math.frexp(abs(number))[1] - 1, -126)
    step = math.ldexp(1.0, exponent - 7)
    lower = math.floor(abs(number) / step) * step
    sign = math.copysign(1.0, number)
    return sign * lower, sign * (lower + step), (abs(number) - lower) / step


@pytest.mark.parametrize(
    "number",
    [
        1.0 + 2.0**-9,
        -1.0 - 3 * 2.0**-20,
        0.1,
        -0.1,
        1.99999,
        -255.7,
        1e-30,
        -3.3e38,
        2.0**-126 * 1.3,
        -1e-40,
        2.0**-149,
    ],
)
def test_of_all_noises_the_share_that_rounds_up_is_the_fraction(number):
    """All 65,536 values of the noise: the expected value is exact, not only likely."""
    exact = float(np.float32(number))
    lower, upper, fraction = neighbours(exact)
    rounded = to_bfloat16(float32(number).expand(2**16).contiguous(), ALL_16).double()
    assert set(rounded.tolist()) <= {lower, upper}
    assert (rounded == upper).sum().item() == round(fraction * 2**16)
    if abs(exact) > 1e-37:  # the mean of subnormal numbers is not exact in float64 either, only their count is
        assert rounded.mean().item() == pytest.approx(exact, rel=1e-15)


def test_what_bfloat16_can_hold_stays_whatever_the_noise():
    """All 65,536 bfloat16 numbers, zeros of both signs, infinities and NaN among them."""
    every = ALL_16.to(torch.int32).sub(2**15).to(torch.int16).view(torch.bfloat16)
    for noise in (0, 1, 2**15, 2**16 - 1, 2**62 + 2**16 - 1):
        rounded = to_bfloat16(every.float(), torch.full((2**16,), noise))
        number = ~every.isnan()
        assert torch.equal(rounded.view(torch.int16)[number], every.view(torch.int16)[number])
        assert rounded[~number].isnan().all()


def test_above_the_largest_bfloat16_the_neighbour_is_infinity():
    half_way = float32(LARGEST_BFLOAT16 + 2.0**119)
    rounded = to_bfloat16(half_way.expand(2**16).contiguous(), ALL_16).double()
    assert set(rounded.tolist()) == {LARGEST_BFLOAT16, math.inf}
    assert rounded.isinf().sum() == 2**15


def test_drawn_noise_rounds_without_bias():
    """A million draws. p(up) = 0.3: the count is binomial, so within 5·√(n·p·(1 − p)) of n·p."""
    number, generator = float32(1 + 0.3 * 2.0**-7), torch.Generator().manual_seed(0)
    noise = torch.empty(10**6, dtype=torch.int64).random_(generator=generator)
    ups = (to_bfloat16(number.expand(10**6).contiguous(), noise) > 1).sum().item()
    assert abs(ups - 0.3e6) < 5 * math.sqrt(10**6 * 0.3 * 0.7)


@pytest.mark.parametrize(("largest", "bits"), [(SIGNED, 4), (UNSIGNED, 5)])
def test_the_codes_are_small_floats(largest, bits):
    """By hand: code c ≥ 1 stands for (1 + (c mod 8) / 8)·2^(c // 8 − (2^bits − 1)), 0 for 0, the top bit for a sign."""
    made = decode(torch.arange(256, dtype=torch.uint8)[None], torch.ones(1, 1), largest)[0].tolist()
    for code in range(256):
        size = code % 128 if largest == SIGNED else code
        value = (1 + size % 8 / 8) * 2.0 ** (size // 8 - (2**bits - 1)) if size else 0.0
        assert made[code] == (-value if code > largest else value)
    assert max(made) == 1.875


@pytest.mark.parametrize("largest", [SIGNED, UNSIGNED])
@pytest.mark.parametrize("most", [3.7, 1e-12, 2e20])
@pytest.mark.parametrize("share", [0.9, 0.51, 0.1001, 1e-3, 6.1e-5, 2.0**-15])
def test_of_many_noises_the_mean_of_the_codes_is_the_number(largest, most, share):
    """Every 16th of the 2²⁰ values of the noise. The share of those that round up is exact to 2⁻¹⁶, and the neighbours
    are at most an eighth of the number apart, which makes 2e-6."""
    _check_mean(ALL_20[8::16], largest, most, share, 2.5e-6)


@pytest.mark.parametrize(("largest", "share"), [(SIGNED, 0.1001), (UNSIGNED, 1e-3)])
def test_of_all_noises_the_mean_of_the_codes_is_the_number(largest, share):
    """What is left is the rounding of a division and a product in float32."""
    _check_mean(ALL_20, largest, 3.7, share, 1e-6)


def _check_mean(noise_N: torch.Tensor, largest: int, most: float, share: float, tolerance: float) -> None:
    number_NB = float32(most, most * share).expand(len(noise_N), 2).contiguous()
    made_NB = decode(*encode(number_NB, noise_N[:, None].expand(-1, 2), largest), largest).double()
    assert made_NB[:, 1].mean().item() == pytest.approx(float(number_NB[0, 1]), rel=tolerance)
    assert made_NB[:, 0].numpy() == pytest.approx(float(np.float32(most)), rel=2.0**-22)
    assert len(made_NB[:, 1].unique()) <= 2


def test_a_tiny_number_is_zero_or_the_smallest_code_in_the_right_proportion():
    """The smallest code is 1.125·2⁻¹⁵ of a scale of most / 1.875, so 0.6·2⁻¹⁵ of the largest. A third of it: 1 in 3."""
    smallest = 0.6 * 2.0**-15
    number_NB = float32(1.0, -smallest / 3).expand(2**20, 2).contiguous()
    made_N = decode(*encode(number_NB, ALL_20[:, None].expand(-1, 2), SIGNED), SIGNED)[:, 1].double()
    assert made_N.min().item() == pytest.approx(-smallest, rel=1e-6)
    assert made_N.max().item() == 0
    assert (made_N < 0).double().mean().item() == pytest.approx(1 / 3, abs=2.0**-19)


def test_a_second_moment_above_zero_never_becomes_zero():
    number_NB = float32(1.0, 1e-30, 0.0).expand(4096, 3).contiguous()
    noise_NB = torch.randint(2**20, (4096, 3), generator=torch.Generator().manual_seed(0))
    made_NB = decode(*encode(number_NB, noise_NB, UNSIGNED), UNSIGNED)
    assert torch.allclose(made_NB[:, 1], torch.tensor(0.6 * 2.0**-31))
    assert not made_NB[:, 2].any()


@pytest.mark.parametrize("largest", [SIGNED, UNSIGNED])
@pytest.mark.parametrize("middle", [1.0, 1e-9, 1e9])
def test_the_error_is_less_than_an_eighth(largest, middle):
    """Neighbours are 2^(e−3) apart and a number is at least 2^e, so the error is below an eighth of the number. Below
    the smallest code it is at most that code: 0.6·2⁻¹⁵ or 0.6·2⁻³¹ of the block's largest."""
    generator = torch.Generator().manual_seed(1)
    number_NB = torch.exp(torch.randn(500, 256, generator=generator) * 4) * middle
    if largest == SIGNED:
        number_NB *= torch.randint(2, (500, 256), generator=generator) * 2 - 1
    noise_NB = torch.randint(2**62, (500, 256), generator=generator)
    made_NB = decode(*encode(number_NB, noise_NB, largest), largest)
    most_N1 = number_NB.abs().amax(1, keepdim=True)
    smallest_N1 = 0.6 * most_N1 * (2.0**-15 if largest == SIGNED else 2.0**-31)
    error_NB = (made_NB - number_NB).abs()
    assert (error_NB <= torch.maximum(number_NB.abs() / 8, smallest_N1) * (1 + 1e-6)).all()
    assert (made_NB * number_NB >= 0).all()


def test_zeros_and_negligible_blocks_are_zero_and_the_mirrored_block_is_mirrored():
    noise_NB = torch.randint(2**20, (1, 256), generator=torch.Generator().manual_seed(0))
    for number in (0.0, NEGLIGIBLE / 2, 1e-45):
        code, scale = encode(torch.full((1, 256), number), noise_NB, SIGNED)
        assert not code.any()
        assert not scale.any()
        assert not decode(code, scale, SIGNED).any()
    number_NB = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))
    made = decode(*encode(number_NB, noise_NB, SIGNED), SIGNED)
    assert torch.equal(made, -decode(*encode(-number_NB, noise_NB, SIGNED), SIGNED))
