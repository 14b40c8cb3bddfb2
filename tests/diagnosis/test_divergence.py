"""Divergences against exact sums over every response of a small policy."""

import itertools
import math

import numpy as np
import pytest
import torch

from solera.diagnosis import exact
from solera.diagnosis.divergence import LogRatios


def test_on_policy_all_is_zero_and_every_sample_counts():
    figures = LogRatios(np.zeros(7), np.array([0, 0, 1, 1, 1, 2, 3]), np.ones(4)).divergences()
    assert figures == {
        "tv_sequence": 0.0, "tv_token": 0.0, "kl": 0.0, "chi2": 0.0,
        "ess": 1.0,
    }  # fmt: skip


def test_two_responses_by_hand():
    # Response 0: ratios ½ and 3, w = 3/2. Response 1: ratio ¼, w = ¼.
    log_ratio_T = np.log([0.5, 3.0, 0.25])
    figures = LogRatios(log_ratio_T, np.array([0, 0, 1]), np.ones(2)).divergences()
    assert figures["tv_sequence"] == pytest.approx((0 + 0.75) / 2)
    assert figures["tv_token"] == pytest.approx((0.5 + 0 + 0.75) / 3)
    by_token = [(0.5 - 1 - math.log(0.5)) + (3 - 1 - math.log(3)), 0.25 - 1 - math.log(0.25)]
    assert figures["kl"] == pytest.approx(sum(by_token) / 2)
    assert figures["chi2"] == pytest.approx((0.25 + 0.5625) / 2)
    assert figures["ess"] == pytest.approx(1.75**2 / (2 * (2.25 + 0.0625)))


def test_a_response_that_stands_for_several_counts_as_often():
    log_ratio_T = np.array([0.3, -0.2, 0.7])
    repeated = LogRatios(log_ratio_T[[0, 1, 2, 2, 2]], np.array([0, 0, 1, 2, 3]), np.ones(4)).divergences()
    weighed = LogRatios(log_ratio_T, np.array([0, 0, 1]), np.array([1.0, 3.0])).divergences()
    assert weighed == pytest.approx(repeated)


def test_by_label_each_is_as_if_alone():
    log_ratio_T = np.array([0.3, -0.2, 0.7, -0.4])
    found = LogRatios(log_ratio_T, np.array([0, 0, 1, 2]), np.array([1.0, 2.0, 3.0])).divergences_by(["b", None, "a"])
    alone = LogRatios(log_ratio_T[:2], np.array([0, 0]), np.ones(1)).divergences()
    assert list(found) == ["a", "b"]
    assert found["b"] == pytest.approx(alone)
    assert found["a"]["kl"] == pytest.approx(math.exp(-0.4) - 0.6) and found["a"]["tv_token"] == pytest.approx(
        1 - math.exp(-0.4)
    )


def test_weighted_by_alpha_the_estimates_are_the_exact_divergences():
    """Every response of two tokens over three symbols, as often as α writes it: the means are then exact."""
    alpha = {0: [0.5, 0.25, 0.25], 1: [0.25, 0.5, 0.25]}
    policy = {0: [0.25, 0.5, 0.25], 1: [0.5, 0.25, 0.25]}
    log_ratio, response, number = [], [], 0
    exact_tv = exact_kl = exact_second = 0.0
    for first, second in itertools.product(range(3), repeat=2):
        probability = alpha[0][first] * alpha[1][second]
        other = policy[0][first] * policy[1][second]
        exact_tv += abs(other - probability) / 2
        exact_kl += probability * math.log(probability / other)
        exact_second += other**2 / probability
        for _ in range(round(probability * 16)):
            log_ratio += [math.log(policy[0][first] / alpha[0][first]), math.log(policy[1][second] / alpha[1][second])]
            response += [number, number]
            number += 1
    assert number == 16
    figures = LogRatios(np.array(log_ratio), np.array(response), np.ones(number)).divergences()
    assert figures["tv_sequence"] == pytest.approx(exact_tv)
    assert figures["kl"] == pytest.approx(exact_kl)
    assert figures["chi2"] == pytest.approx(exact_second - 1)
    assert figures["ess"] == pytest.approx(1 / exact_second)


def of_each_response(space: exact.Space, pi, alpha) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """α(y), the estimate of KL from response y alone, and −log w of y, for every y that can be written."""
    logp_BT, behaviour_logp_BT = exact.token_logp(space, pi), exact.token_logp(space, alpha)
    log_ratio_BT = logp_BT - behaviour_logp_BT
    estimate_B = [
        LogRatios(log_ratio_T[mask_T], np.zeros(mask_T.sum(), np.int64), np.ones(1)).divergences()["kl"]
        for log_ratio_T, mask_T in zip(log_ratio_BT.numpy(), space.mask_BT.numpy(), strict=True)
    ]
    return behaviour_logp_BT.sum(-1).exp().numpy(), np.array(estimate_B), -log_ratio_BT.sum(-1).numpy()


@pytest.mark.parametrize(("vocabulary", "length"), [(4, 1), (3, 3), (4, 3)])
@pytest.mark.parametrize("apart", [0.01, 0.1, 0.5, 1.5])
def test_kl_is_unbiased_never_negative_and_less_noisy_than_the_log_ratio(vocabulary, length, apart):
    """The expectation over every response that α can write, against Σ α·log(α/π) over the same responses."""
    space, generator = exact.space_of(vocabulary, length), torch.Generator().manual_seed(vocabulary * length)
    for _ in range(5):
        alpha = torch.randn(space.prefixes, vocabulary, generator=generator, dtype=torch.float64)
        pi = alpha + apart * torch.randn(alpha.shape, generator=generator, dtype=torch.float64)
        alpha_B, estimate_B, log_ratio_B = of_each_response(space, pi, alpha)
        assert (estimate_B >= 0).all()
        assert alpha_B @ estimate_B == pytest.approx((alpha_B * log_ratio_B).sum(), rel=1e-9)
        spread, spread_raw = (np.sqrt(alpha_B @ x**2 - (alpha_B @ x) ** 2) for x in (estimate_B, log_ratio_B))
        assert spread < (0.5 if apart <= 0.1 else 1) * spread_raw


@pytest.mark.parametrize("log_ratio", [-60.0, -1e-9, 0.0, 1e-9, 3e-17, 60.0, 1e10])
def test_kl_of_any_one_token_is_finite_and_not_negative(log_ratio):
    found = LogRatios(np.array([log_ratio]), np.array([0]), np.ones(1)).divergences()["kl"]
    assert 0 <= found < math.inf
