"""Oracle 7: on enumerable policies the identity is exact, the bounds hold, the group's estimate is unbiased."""

import itertools

import numpy as np
import pytest
import torch

from solera.diagnosis import exact, improvement


def random_prompt(seed: int) -> tuple[np.ndarray, ...]:
    """π, π_k and α over the responses of a random tree, near each other or far apart, with rewards in [0, 1]."""
    rng = np.random.default_rng(seed)
    space = exact.space_of(int(rng.integers(2, 5)), int(rng.integers(1, 4)))
    scale, far = 10.0 ** rng.uniform(-0.7, 0.5), 10.0 ** rng.uniform(-2, 0.3)
    base = scale * rng.normal(size=(space.prefixes, space.vocabulary))
    policies = [
        exact.response_logp(space, torch.from_numpy(base + far * rng.normal(size=base.shape))).exp().numpy()
        for _ in range(3)
    ]
    reward = rng.random(len(space))
    return *policies, (reward > rng.uniform(0.2, 0.8)).astype(float) if seed % 2 else reward


@pytest.mark.parametrize("seed", range(40))
def test_the_identity_is_exact(seed: int):
    pi, pi_k, alpha, reward = random_prompt(seed)
    found = improvement.identity(*map(torch.from_numpy, (alpha, pi / alpha, pi_k / alpha, reward)))
    assert found.item() == pytest.approx((pi * reward).sum() - (pi_k * reward).sum(), abs=1e-12)


def test_the_bounds_are_never_violated_and_the_tight_one_can_be_positive():
    theorem_gains = []
    for seed in range(1500):
        pi, pi_k, alpha, reward = random_prompt(seed)
        gain = ((pi - pi_k) * reward).sum()
        arguments = list(map(torch.from_numpy, (alpha, pi / alpha, pi_k / alpha, reward)))
        theorem1 = improvement.lower_bound(*arguments, factor=2).item()
        tight = improvement.lower_bound(*arguments, factor=1).item()
        assert theorem1 <= tight + 1e-12
        assert tight <= gain + 1e-12
        theorem_gains.append(theorem1)
    assert max(theorem_gains) < 1e-3
    # α = π_k = (½, ½), π = (0, 1), r = (0, 1): σ ≈ ½, L = ½/σ, TV = ½; the bound is the gain itself, but for ε.
    half, one = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    r = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert improvement.lower_bound(half, 2 * r, one, r, factor=1).item() == pytest.approx(0.5, abs=1e-12)
    assert improvement.lower_bound(half, 2 * r, one, r, factor=2).item() == pytest.approx(0, abs=1e-3)


def test_the_bound_by_hand():
    """α = (.8, .2), π = (.6, .4), π_k = (.7, .3), r = (0, 1): μ = .2, σ² = .1601, TV .2 and .1, L = .2/σ."""
    alpha, w, w_k, r = (
        torch.tensor(v, dtype=torch.float64) for v in ([0.8, 0.2], [0.75, 2.0], [0.875, 1.5], [0.0, 1.0])
    )
    sigma = 0.1601**0.5
    assert improvement.identity(alpha, w, w_k, r).item() == pytest.approx(0.1)
    assert improvement.surrogate(alpha, w, r).item() == pytest.approx(0.2 / sigma)
    tight = 0.2 / sigma - (1 - sigma) / sigma * 0.2 - 0.1
    assert improvement.lower_bound(alpha, w, w_k, r, factor=1).item() == pytest.approx(tight)
    assert improvement.lower_bound(alpha, w, w_k, r, factor=2).item() == pytest.approx(2 * tight - 0.2 / sigma)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_group_estimate_is_unbiased_over_all_groups(size: int):
    """Every ordered group of four responses; those of zero variance count as 0."""
    rng = np.random.default_rng(size)
    pi, pi_k, alpha = (rng.dirichlet(np.ones(4)) for _ in range(3))
    reward = np.array([0.0, 1.0, 1.0, 0.3])
    everyone = np.array(list(itertools.product(range(4), repeat=size)))
    weight = alpha[everyone].prod(1)
    estimate = improvement.group_estimates(
        *(torch.from_numpy(value[everyone.ravel()]) for value in (pi / alpha, pi_k / alpha, reward)),
        torch.arange(len(everyone)).repeat_interleave(size), len(everyone),
    )  # fmt: skip
    gain = ((pi - pi_k) * reward).sum()
    assert (weight * estimate.numpy()).sum() == pytest.approx(gain, abs=1e-12)
    # Without the factor the estimate is short by (G−1)/G, which this test must be able to see.
    assert abs(gain) * (1 / size) > 1e-3
    varied = np.ptp(reward[everyone], axis=1) > 0
    assert estimate.numpy()[~varied] == pytest.approx(np.zeros((~varied).sum()))
