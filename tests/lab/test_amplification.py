"""Oracle 6, with the optimum written out from π ∝ π_ref·exp(A/β)."""

import math
from itertools import pairwise

import pytest

from solera.lab.amplification import fixed_points, logit, measure, optimised, slope, step, success
from solera.lab.options import LabOptions


def best(p: float, p_ref: float, beta: float) -> float:
    """Success rate of π ∝ π_ref·exp(A/β), the maximum of E_π[A] − β·KL(π‖π_ref)."""
    sigma = math.sqrt(p * (1 - p) + 1e-4)
    right, wrong = p_ref * math.exp((1 - p) / sigma / beta), (1 - p_ref) * math.exp(-p / sigma / beta)
    return right / (right + wrong)


@pytest.mark.parametrize(
    ("p", "p_ref", "beta"), [(0.1, 0.1, 2.0), (0.5, 0.3, 1.0), (0.25, 0.001, 5.0), (0.8, 0.4, 3.0)]
)
def test_the_closed_form_and_the_optimised_loss_are_the_optimum(p: float, p_ref: float, beta: float):
    wanted = best(p, p_ref, beta)
    formula = 1 / (1 + (1 - p_ref) / p_ref * math.exp(-1 / (beta * math.sqrt(p * (1 - p) + 1e-4))))
    assert wanted == pytest.approx(formula, rel=1e-9)
    assert success(step(logit(p), logit(p_ref), beta)) == pytest.approx(wanted, rel=1e-9)
    assert success(optimised(logit(p), logit(p_ref), beta)) == pytest.approx(wanted, rel=1e-6)


def test_fixed_points_exceed_the_reference_and_there_may_be_several():
    for p_ref, beta in ((0.1, 2.0), (0.001, 5.0), (0.3, 1.0), (0.5, 0.5), (0.7, 10.0)):
        found = fixed_points(logit(p_ref), beta)
        assert found
        for x in found:
            assert x > logit(p_ref)
            assert step(x, logit(p_ref), beta) == pytest.approx(x, abs=1e-9)
    first, second, third = (success(x) for x in fixed_points(logit(0.1), 2.0))
    assert first == pytest.approx(best(first, 0.1, 2.0), abs=1e-6)
    assert second == pytest.approx(best(second, 0.1, 2.0), abs=1e-6)
    assert 0.25 < first < 0.27
    assert 0.99 < second < 0.999 < third


def test_the_slope_tells_what_attracts():
    for x in (-2.0, -0.3, 0.0, 1.5):
        numeric = (step(x + 1e-6, -2.0, 2.0) - step(x - 1e-6, -2.0, 2.0)) / 2e-6
        assert slope(x, 2.0) == pytest.approx(numeric, abs=1e-6)
    low, middle, high = fixed_points(logit(0.1), 2.0)
    assert abs(slope(low, 2.0)) < 1 and abs(slope(high, 2.0)) < 1 < slope(middle, 2.0)


def test_it_settles_or_cycles():
    settles, _, cycles = measure(LabOptions(quick=True), lambda items, _: items)
    assert (settles["p_ref"], settles["beta"], cycles["p_ref"], cycles["beta"]) == (0.1, 2.0, 0.001, 5.0)
    p = 0.1
    for _ in range(60):
        p = best(p, 0.1, 2.0)
    assert settles["closed_form"][-1] == pytest.approx(p, abs=1e-9)
    a, b = cycles["closed_form"][-2:]
    assert max(a, b) > 10 * min(a, b)
    assert best(best(a, 0.001, 5.0), 0.001, 5.0) == pytest.approx(a, rel=0.05)
    for case in (settles, cycles):
        assert case["optimised"][:4] == pytest.approx(case["closed_form"][:4], rel=2e-3)
        amplified = case["reference_swapped"]
        assert all(later > earlier for earlier, later in pairwise(amplified))
