"""Every number here is worked out by hand, by counting, or with fractions."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from solera.errors import SoleraError
from solera.evaluate.statistics import estimate, mean_over_problems, paired, pass_at_k, share_over_problems, wilson


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 2, 1, Fraction(2, 5)),
        (5, 2, 2, Fraction(7, 10)),  # 10 pairs, 3 of them of the 3 that failed
        (5, 2, 3, Fraction(9, 10)),
        (5, 2, 4, 1),
        (10, 3, 4, Fraction(5, 6)),  # 1 − 35/210
        (8, 0, 8, 0),
        (8, 8, 1, 1),
        (1, 1, 1, 1),
        (5000, 1, 2500, Fraction(1, 2)),  # one that passed is among half of the attempts half of the time
        (4000, 2, 1000, 1 - Fraction(3000 * 2999, 4000 * 3999)),
        (5000, 1, 1, Fraction(1, 5000)),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == float(expected)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_success(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 3), (6, 2), (6, 6)])
def test_pass_at_k_is_unbiased(n, k):
    """Over all outcomes of n attempts that pass with probability p, its mean is 1 − (1 − p)ᵏ."""
    p = Fraction(1, 3)
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * Fraction(pass_at_k(n, c, k)) for c in range(n + 1))
    assert float(mean) == pytest.approx(float(1 - (1 - p) ** k), abs=1e-15)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((4, 1, 5), "pass@5 needs at least 5 attempts per problem; there are 4"), ((4, 5, 1), "0 ≤ passed ≤ n"),
     ((4, 1, 0), "k ≥ 1"), ((0, 0, 1), "there are 0")],
)  # fmt: skip
def test_pass_at_k_refuses_what_cannot_be(arguments, says):
    with pytest.raises(SoleraError, match=says):
        pass_at_k(*arguments)


def test_wilson_by_hand():
    """8 of 10: ((0.8 + 0.19208) ± 1.96·√(0.016 + 0.009604)) / 1.38416 with 1.96² = 3.8416."""
    low, high = wilson(0.8, 10)
    assert low == pytest.approx((0.99208 - 1.96 * math.sqrt(0.025604)) / 1.38416, abs=1e-12)
    assert (low, high) == pytest.approx((0.490157, 0.943319), abs=1e-6)


@pytest.mark.parametrize("n", [1, 3, 10, 500])
def test_wilsons_limits_are_where_the_share_is_z_standard_errors_away(n):
    """Both limits p solve (c/n − p)² = z²·p(1 − p)/n; for none and all right they have a closed form."""
    for c in {0, 1, n // 3, n - 1, n}:
        low, high = wilson(c / n, n)
        for limit in (low, high):
            assert (c / n - limit) ** 2 == pytest.approx(3.8416 * limit * (1 - limit) / n, abs=1e-12)
        assert 0 <= low <= c / n <= high <= 1
    assert wilson(0, n) == (0.0, pytest.approx(3.8416 / (n + 3.8416)))
    assert wilson(1, n) == (pytest.approx(n / (n + 3.8416)), 1.0)


def test_the_interval_of_a_mean_by_hand():
    """1, ½, 0, ½: mean ½, s² = (¼ + 0 + ¼ + 0)/3 = 1/6, half-width 1.96·√(1/24)."""
    found = mean_over_problems([1.0, 0.5, 0.0, 0.5])
    half = 1.96 * math.sqrt(1 / 24)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-15)
    assert half == pytest.approx(0.400083, abs=1e-6)


def test_the_interval_of_a_mean_at_its_edges():
    one = mean_over_problems([0.25])
    assert (one.value, one.low, one.high) == (0.25, None, None)


@pytest.mark.parametrize(
    "values",
    [[1.0, 1.0, 1.0], [0.0, 0.0], [0.1 + 0.2 - 0.3, *[0.0] * 9], [0.1 + 0.2, 0.3, 0.3], [1e5 + 0.1, 1e5 + 0.2 - 0.1]],
)
def test_values_that_are_equal_but_for_rounding_have_no_interval(values):
    alike = mean_over_problems(values)
    assert (alike.value, alike.low, alike.high) == (pytest.approx(values[-1], abs=1e-10), None, None)


def test_a_small_spread_is_not_rounding():
    """1, 1 + 10⁻⁹: s = 10⁻⁹/√2, half-width 1.96·s/√2."""
    found = mean_over_problems([1.0, 1.0 + 1e-9])
    assert found.high - found.value == pytest.approx(0.98e-9, rel=1e-6)


def test_an_estimate_leaves_out_problems_without_a_value():
    assert estimate([1.0, None, 0.0, 1.0], share=True) == share_over_problems([1.0, 0.0, 1.0])
    assert estimate([0.5, None, 0.0], share=False) == mean_over_problems([0.5, 0.0])
    assert estimate([None, None], share=True) is None


def test_a_share_of_yes_and_no_has_wilsons_interval():
    """498 of 500, by hand: ((0.996 + 0.0038416) ± 1.96·√(0.996·0.004/500 + 0.00384160²/1.96²)) / 1.0076832."""
    found = share_over_problems([1.0] * 498 + [0.0] * 2)
    assert (found.low, found.high) == pytest.approx((0.985534, 0.998902), abs=1e-6)
    assert share_over_problems([1.0] * 500).low == pytest.approx(500 / 503.8416)  # not 1: other problems may differ


def test_a_share_that_varies_less_counts_as_more_problems():
    """Nine of 1 and one of ½: m = 0.95, s² = (9·0.0025 + 0.2025)/9 = 0.025, n = 10·0.0475/0.025 = 19."""
    found = share_over_problems([1.0] * 9 + [0.5])
    assert (found.value, found.problems) == (0.95, 10)
    for limit in (found.low, found.high):
        assert (0.95 - limit) ** 2 == pytest.approx(3.8416 * limit * (1 - limit) / 19, abs=1e-12)
    mirrored = share_over_problems([0.0] * 9 + [0.5])
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))


@pytest.mark.parametrize("values", [[0.5], [0.5] * 4])
def test_a_share_without_spread_is_not_certain(values):
    """(½ + z²/2P ± z·√(¼/P + z²/4P²)) / (1 + z²/P) = ½ ± z/2/√(P + z²)."""
    found, half = share_over_problems(values), 0.98 / math.sqrt(len(values) + 3.8416)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half))


def test_a_share_that_spreads_by_rounding_only_is_not_certain():
    """Tenths in binary: the mean of three is not 1/10. (0.1 + z²/6 ± z·√(0.09/3 + z²/36)) / (1 + z²/3)."""
    found, half = share_over_problems([0.1] * 3), 1.96 * math.sqrt(0.03 + 3.8416 / 36)
    limits = [(0.1 + 3.8416 / 6 + sign * half) / (1 + 3.8416 / 3) for sign in (-1, 1)]
    assert (found.low, found.high) == pytest.approx(limits)


@pytest.mark.parametrize(("hard", "chance", "attempts"), [(0.01, 0.5, 16), (0.05, 0.5, 4), (1.0, 0.03, 4)])
def test_the_interval_of_a_share_contains_the_truth_in_19_of_20_cases(hard, chance, attempts):
    """Problems that are always solved, and hard ones. The normal interval contains the truth of the first in 90 %.
    The standard error of 1,500 evaluations is 0.6 points."""
    rng, truth = np.random.default_rng(0), 1 - hard + hard * chance
    chance_EP = np.where(rng.random((1500, 500)) < hard, chance, 1.0)
    inside = 0
    for value_P in (rng.binomial(attempts, chance_EP) / attempts).tolist():
        found = share_over_problems(value_P)
        inside += found.low <= truth <= found.high
    assert 0.935 < inside / 1500 < 0.97


def test_a_mean_reward_may_be_outside_0_to_1():
    assert estimate([1.0, 1.0, 1.0], share=False).low is None  # a reward of 1 is not a yes
    assert estimate([1.0] * 9 + [0.5], share=False).high == pytest.approx(1.048)


def test_a_paired_difference_by_hand():
    """Differences 0, 1, 1, −1: mean ¼, s² = (1/16 + 9/16 + 9/16 + 25/16)/3 = 11/12, half-width 1.96·√(11/48)."""
    found = paired([1.0, 0.0, 0.0, 1.0, 0.0, None], [1.0, 1.0, 1.0, 0.0, None, 1.0])
    half = 1.96 * math.sqrt(11 / 48)
    assert found.estimate.problems == 4
    assert (found.estimate.value, found.estimate.low, found.estimate.high) == pytest.approx(
        (0.25, 0.25 - half, 0.25 + half), abs=1e-15
    )
    assert (found.only_first, found.only_second, found.excludes_zero) == (1, 2, False)


def test_pairing_cancels_what_both_find_hard():
    """Both rise from 0 to 1 over the problems, the second 0.1 above the first: apart the intervals overlap widely."""
    first = [i / 10 for i in range(10)]
    second = [value + (0.1 if i else 0.2) for i, value in enumerate(first)]
    assert mean_over_problems(first).high > mean_over_problems(second).low
    found = paired(first, second)
    assert found.excludes_zero
    assert found.estimate.value == pytest.approx(0.11)  # (9 · 0.1 + 0.2)/10
    assert found.estimate.high - found.estimate.low == pytest.approx(2 * 1.96 * 0.01)  # s² = (9 · 0.0001 + 0.0081)/9
    assert paired(second, first).estimate.value == pytest.approx(-0.11)
    assert paired(second, first).excludes_zero


def test_a_pair_without_common_problems_has_no_difference_and_one_problem_decides_nothing():
    assert paired([None, 1.0], [1.0, None]) is None
    assert not paired([0.0], [1.0]).excludes_zero
    assert not paired([0.5, 1.0], [0.5, 1.0]).excludes_zero


def test_equal_differences_decide_nothing():
    """0 → 1 on each of two problems, or from 1/3 to 2/3 and from 2/3 to 1, which is a third up to rounding."""
    for first, second in (([0.0, 0.0], [1.0, 1.0]), ([1 / 3, 2 / 3], [2 / 3, 1.0])):
        found = paired(first, second)
        assert (found.estimate.low, found.estimate.high, found.excludes_zero) == (None, None, False)
