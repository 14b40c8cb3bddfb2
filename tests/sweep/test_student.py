"""The t distribution against closed forms, integration and printed tables; pairs and corrections by hand."""

import math

import numpy as np
import pytest

from solera.diagnosis.student import central_probability, two_sided_quantile
from solera.sweep.student import holm, paired, spread


def integrated(t: float, freedom: float) -> float:
    """P(|T| < t): ∫ Γ((ν+1)/2) / (√(νπ)·Γ(ν/2)) · (1 + x²/ν)^(−(ν+1)/2) over (−t, t), by Gauss and Legendre."""
    x, weight = np.polynomial.legendre.leggauss(200)
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density = np.exp(log_factor - (freedom + 1) / 2 * np.log1p((t * x) ** 2 / freedom))
    return t * float(weight @ density)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 19, 60])
@pytest.mark.parametrize("t", [0.1, 1.0, 2.5, 9.0])
def test_probability_is_the_integral_of_the_density(freedom, t):
    assert central_probability(t, freedom) == pytest.approx(integrated(t, freedom), abs=1e-11)


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (30, 2.042), (120, 1.980)],
)
def test_quantiles_of_the_printed_table(freedom, table):
    assert two_sided_quantile(freedom) == pytest.approx(table, abs=5e-4)


def test_quantiles_in_closed_form():
    """ν = 1 is Cauchy: tan(π·p/2); ν = 2: p·√(2/(1 − p²))."""
    assert two_sided_quantile(1) == pytest.approx(math.tan(math.pi * 0.95 / 2), rel=1e-12)
    assert two_sided_quantile(2, 0.99) == pytest.approx(0.99 * math.sqrt(2 / (1 - 0.99**2)), rel=1e-12)


def test_three_pairs_by_hand():
    """d = 1, 2, 6: m = 3, s² = (4 + 1 + 9)/2 = 7, error √(7/3); ν = 2: P(|T| < t) = t/√(2 + t²)."""
    found = paired([1.0, 2.0, 6.0])
    error = math.sqrt(7 / 3)
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) * error
    assert (found.mean, found.higher, found.lower, found.seeds) == (3.0, 3, 0, 3)
    assert found.low == pytest.approx(3 - half)
    assert found.high == pytest.approx(3 + half)
    t = 3 / error
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_the_interval_excludes_zero_exactly_where_p_is_below_one_in_twenty():
    rng = np.random.default_rng(0)
    sides = set()
    for _ in range(200):
        found = paired(list(rng.normal(0.8, 1.0, int(rng.integers(2, 9)))))
        excludes = not found.low <= 0 <= found.high
        assert excludes == (found.p < 0.05)
        sides.add(excludes)
    assert sides == {True, False}


@pytest.mark.parametrize("differences", [[0.0, 0.0, 0.0], [0.02, 0.02], [0.3 - 0.1, 0.2, 0.4 - 0.2], [0.1]])
def test_without_spread_there_is_no_interval(differences):
    found = paired(differences)
    assert (found.low, found.high, found.p) == (None, None, None)


def test_signs_are_counted():
    found = paired([0.1, -0.2, 0.0, 0.3])
    assert (found.higher, found.lower, found.seeds) == (2, 1, 4)


def test_spread():
    assert spread([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt(7))
    assert spread([1.0]) is None


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.6 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.6; then monotone, at most 1."""
    assert holm([0.03, 0.6, 0.01, 0.02]) == pytest.approx([0.06, 0.6, 0.04, 0.06])
    assert holm([0.04, 0.04]) == pytest.approx([0.08, 0.08])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
