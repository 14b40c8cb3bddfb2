"""What small groups do, against sums over the number of successes written out here."""

import math

import pytest

from solera.lab.groups import ADVANTAGES, measure
from solera.lab.options import LabOptions


def scale(advantage: str, p: float, size: int) -> float:
    """E[mean_i A_i·(r_i − p)] / (p(1−p)), over ∇J's or ∇J/σ's: for rewards 0 and 1 the gradient is a multiple of ∇J."""
    total = 0.0
    for right in range(1, size):
        mean = right / size
        divisor = {
            "mean": 1.0,
            "leave_one_out": (size - 1) / size,
            "whiten": math.sqrt(mean * (1 - mean) + 1e-4),
            "whiten_bessel": math.sqrt(mean * (1 - mean) * size / (size - 1)) + 1e-4,
        }[advantage]
        chance = math.comb(size, right) * p**right * (1 - p) ** (size - right)
        total += chance * (right * (1 - mean) * (1 - p) + (size - right) * mean * p) / divisor / size
    whitened = math.sqrt(p * (1 - p) + 1e-4) if advantage.startswith("whiten") else 1.0
    return total / (p * (1 - p)) * whitened


@pytest.fixture(scope="module")
def measured() -> dict:
    return measure(LabOptions(quick=True), lambda items, _: items)


def row(measured: dict, advantage: str, size: int) -> dict:
    return next(r for r in measured["rows"] if (r["advantage"], r["size"]) == (advantage, size))


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_scale_at_every_success_rate(measured: dict, advantage: str, size: int):
    wanted = [scale(advantage, p, size) for p in measured["success_rates"]]
    assert row(measured, advantage, size)["scale"] == pytest.approx(wanted, rel=1e-9)


def test_what_the_corrections_do(measured: dict):
    for size in (2, 4, 8):
        assert row(measured, "leave_one_out", size)["scale"] == pytest.approx([1.0] * len(measured["success_rates"]))
        assert row(measured, "mean", size)["tilt_degrees"] == pytest.approx(0, abs=1e-4)
        whiten, bessel = (row(measured, name, size) for name in ("whiten", "whiten_bessel"))
        # Bessel's correction divides by a larger deviation: it shrinks what was short already, and mends no angle.
        assert all(b < a < 1 for a, b in zip(whiten["scale"], bessel["scale"], strict=True))
        assert bessel["tilt_degrees"] == pytest.approx(whiten["tilt_degrees"], abs=0.1)
        assert whiten["tilt_degrees"] > 5
    angles = [row(measured, "whiten", size)["graded_degrees"] for size in (2, 4, 8)]
    assert angles == sorted(angles, reverse=True) and angles[0] > 5
