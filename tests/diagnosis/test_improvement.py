"""Oracle 7: on enumerable policies the identity is exact, the bounds hold, the group's estimate is unbiased."""

import itertools
import math

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


Bandit = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def random_bandit(rng: np.random.Generator, drift: float) -> Bandit:
    """π, π_k, α and rewards of four arms; π leans towards the rewarded ones by `drift`."""
    logits, reward = rng.normal(size=4), (rng.random(4) > 0.5).astype(float)
    moved = (logits + 0.2 * rng.normal(size=4) + drift * reward, logits + 0.2 * rng.normal(size=4), logits)
    pi, pi_k, alpha = (np.exp(v) / np.exp(v).sum() for v in moved)
    return pi, pi_k, alpha, reward


def sampled_probe(rng: np.random.Generator, bandits: list[Bandit], prompts: int, size: int) -> tuple[torch.Tensor, ...]:
    """A probe on prompts drawn from a population of them: w and w_k of each response, rewards, groups."""
    rows = []
    for number in rng.integers(len(bandits), size=prompts):
        pi, pi_k, alpha, reward = bandits[number]
        drawn = rng.choice(4, size, p=alpha)
        rows.append(np.stack([(pi / alpha)[drawn], (pi_k / alpha)[drawn], reward[drawn]]))
    w, w_k, r = torch.from_numpy(np.concatenate(rows, axis=1))
    return w, w_k, r, torch.arange(prompts).repeat_interleave(size)


def test_two_prompts_by_hand():
    """Prompt 0: r = (0, 1), w = (½, 2), w_k = 1: 2/(2−1)·½·[−½·(−½) + 1·½] = ¾. Prompt 1 is flat and counts as 0.

    Mean ⅜. Var is ½ and 0, pooled ¼; J(π)−J(α) is ¾ and 0; TV (½ + 0)/4 and 0.
    A third prompt with one reward is left out.
    """
    w = torch.tensor([0.5, 2.0, 1.0, 1.0, 9.0], dtype=torch.float64)
    r = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 2, 2, 1])
    found = improvement.estimate_improvement(w, torch.ones(5, dtype=torch.float64), r, group)
    assert found.gain == pytest.approx(0.375)
    sigma = 0.2501**0.5
    assert found.tight == pytest.approx(0.375 / sigma - (1 - sigma) / sigma * 0.125)
    assert found.theorem1 == pytest.approx(0.375 / sigma - 2 * (1 - sigma) / sigma * 0.125)
    assert (found.mean_w, found.mean_w_error) == pytest.approx((1.125, 0.125))
    metrics = found.metrics()
    # With one more prompt, (¾, 0, 0) and (¾, 0, ¾): means ¼ and ½, errors √((¼ + 1/16 + 1/16)/2/3) = ¼ for both.
    t = 0.95 * math.sqrt(2 / (1 - 0.95**2))  # of two degrees of freedom
    assert metrics["improvement/low"] == pytest.approx(0.25 - t / 4)
    assert metrics["improvement/high"] == pytest.approx(0.5 + t / 4)
    assert metrics["improvement/state"] == 0


def test_the_interval_counts_one_more_prompt_on_each_side():
    """Of (1, 0, 0): (1, 0, 0, 0) has mean ¼ and error ¼, (1, 0, 0, 1) ½ and √(1/12). t of three degrees is 3.1824."""
    low, high = improvement.interval_of_mean(torch.tensor([1.0, 0.0, 0.0]).double())
    assert (low, high) == pytest.approx((0.25 - 3.1824 / 4, 0.5 + 3.1824 / math.sqrt(12)), abs=1e-4)
    turned = improvement.interval_of_mean(torch.tensor([-1.0, 0.0, 0.0]).double())
    assert turned == pytest.approx((-high, -low))


def test_the_added_prompt_is_never_better_than_a_change_of_nothing():
    """Of (2, 4), the lower end is that of (2, 4, 0): mean 2, error √(4/3); the upper end that of (2, 4, 4)."""
    t = 0.95 * math.sqrt(2 / (1 - 0.95**2))
    low, high = improvement.interval_of_mean(torch.tensor([2.0, 4.0]).double())
    assert (low, high) == pytest.approx((2 - t * math.sqrt(4 / 3), 10 / 3 + t * math.sqrt(4 / 9)))
    assert improvement.interval_of_mean(torch.zeros(5).double()) == (0, 0)
    assert improvement.interval_of_mean(torch.ones(1).double()) is None


def test_a_probe_that_does_not_cover_the_policy_gives_no_verdict():
    """Every prompt gains ½ with hardly any spread, but the weights average ½."""
    gain = torch.tensor([0.499, 0.501] * 8).double()
    w = torch.stack([torch.zeros(16).double(), 2 * gain], 1).flatten()  # r = (0, 1): 2·½·(w₁·½ − w₀·(−½) − …)
    before = torch.zeros(32).double()
    r = torch.tensor([0.0, 1.0] * 16).double()
    found = improvement.estimate_improvement(w, before, r, torch.arange(16).repeat_interleave(2))
    assert found.gain == pytest.approx(0.5)
    assert found.metrics()["improvement/low"] > 0.4
    assert not found.covered
    assert found.metrics()["improvement/state"] == 0


def test_one_prompt_is_inconclusive_no_pair_is_nothing_and_odd_rewards_have_no_bounds():
    one = torch.ones(2, dtype=torch.float64)
    found = improvement.estimate_improvement(
        torch.tensor([0.5, 2.0]).double(), one, torch.tensor([0.0, 3.0]).double(), one.long()
    )
    assert found.metrics() == pytest.approx(
        {"improvement/estimate": 2.25, "improvement/mean_w": 1.25, "improvement/state": 0}
    )
    assert found.covered
    assert improvement.estimate_improvement(one, one, one, torch.tensor([0, 1])) is None


def test_the_interval_covers_the_true_gain_and_its_verdicts_are_right():
    """Over 400 probes the 95 % interval covers in 92 to 98 %, and hardly any verdict has the wrong sign."""
    rng = np.random.default_rng(0)
    populations = [[random_bandit(rng, drift) for _ in range(100)] for drift in (0.4, 0.0, -0.4)]
    gains = [np.mean([((pi - pi_k) * r).sum() for pi, pi_k, _, r in population]) for population in populations]
    covers, right, wrong = 0, 0, 0
    for trial in range(400):
        gain = gains[trial % 3]
        m = improvement.estimate_improvement(*sampled_probe(rng, populations[trial % 3], 48, 8)).metrics()
        covers += m["improvement/low"] <= gain <= m["improvement/high"]
        right += m["improvement/state"] * gain > 0
        wrong += m["improvement/state"] * gain < 0
    assert 0.92 * 400 <= covers <= 0.98 * 400
    assert right > 200
    assert wrong < 20


def test_the_pooled_bound_of_many_samples_is_the_mean_bound_at_the_pooled_deviation():
    """Two prompts with known policies, each response as often as α writes it: means are then exact but for (G−1)/G."""
    alpha = np.array([[0.5, 0.5], [0.75, 0.25]])
    pi, pi_k, r = np.array([[0.25, 0.75], [0.5, 0.5]]), np.array([[0.375, 0.625], [0.75, 0.25]]), np.array([0.0, 1.0])
    size = 8000
    drawn = [np.repeat([0, 1], (a * size).astype(int)) for a in alpha]
    w, w_k = (torch.from_numpy(np.concatenate([(p[i] / alpha[i])[drawn[i]] for i in (0, 1)])) for p in (pi, pi_k))
    reward = torch.from_numpy(r[np.concatenate(drawn)])
    found = improvement.estimate_improvement(w, w_k, reward, torch.arange(2).repeat_interleave(size))
    sigma = ((0.25 + 0.1875) / 2 + 1e-4) ** 0.5
    tight = 0.25 / sigma - (1 - sigma) / sigma * 0.25 - 0.0625
    assert found.tight == pytest.approx(tight, abs=1e-3)
    assert found.tight <= (pi - pi_k)[:, 1].mean() + 1e-3


def test_weights_that_do_not_average_one_are_noticed():
    rng = np.random.default_rng(1)
    w, w_k, r, group = sampled_probe(rng, [random_bandit(rng, 0.4) for _ in range(100)], 48, 8)
    assert improvement.estimate_improvement(w, w_k, r, group).covered
    assert not improvement.estimate_improvement(0.7 * w, w_k, r, group).covered
