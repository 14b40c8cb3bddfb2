"""Enumerated policies against hand-made sums, and against an enumeration that walks the tree token by token."""

import itertools
import math

import numpy as np
import pytest
import torch

from solera.diagnosis import exact
from solera.diagnosis.divergence import LogRatios


def random_logits(space: exact.Space, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(space.prefixes, space.vocabulary, dtype=torch.float64, generator=generator)


def walk(logits: np.ndarray, vocabulary: int, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every response, by recursion. Prefixes are numbered by length, then as numbers to base V−1."""
    found: dict[tuple[int, ...], float] = {}

    def number(prefix: tuple[int, ...]) -> int:
        shorter = sum((vocabulary - 1) ** t for t in range(len(prefix)))
        return shorter + sum((token - 1) * (vocabulary - 1) ** i for i, token in enumerate(reversed(prefix)))

    def go_on(prefix: tuple[int, ...], probability: float) -> None:
        row = np.exp(logits[number(prefix)])
        for token in range(vocabulary):
            here, p = (*prefix, token), probability * row[token] / row.sum()
            if token == 0 or len(here) == length:
                found[here] = p
            else:
                go_on(here, p)

    go_on((), 1.0)
    return found


def as_tuples(space: exact.Space) -> list[tuple[int, ...]]:
    return [
        tuple(t for t, m in zip(tokens, mask, strict=True) if m)
        for tokens, mask in zip(space.token_BT.tolist(), space.mask_BT.tolist(), strict=True)
    ]


def test_two_tokens_of_length_two_by_hand():
    """First row: END 1/4, word 3/4. After the word: END 2/3, word 1/3. Space `0`, `1 0`, `1 1`."""
    space = exact.space_of(2, 2)
    assert as_tuples(space) == [(0,), (1, 0), (1, 1)]
    logits_SV = torch.tensor([[1.0, 3.0], [2.0, 1.0]], dtype=torch.float64).log()
    assert exact.response_logp(space, logits_SV).exp().tolist() == pytest.approx([1 / 4, 1 / 2, 1 / 4])
    reward_B = torch.tensor([0.0, 1.0, 0.4], dtype=torch.float64)
    assert exact.expected_reward(space, logits_SV, reward_B).item() == pytest.approx(0.6)
    # ∂J/∂logit[s, v] = P(s)·π(v|s)·(value of v at s − value of s): the word is worth 2/3 + .4/3 = .8.
    gradient_SV = exact.policy_gradient(space, logits_SV, reward_B)
    assert gradient_SV[0].tolist() == pytest.approx([-0.15, 0.15])
    assert gradient_SV[1].tolist() == pytest.approx([0.75 * 2 / 3 * 0.2, -0.75 * 2 / 3 * 0.2])


@pytest.mark.parametrize(("vocabulary", "length", "count"), [(3, 1, 3), (3, 3, 15), (4, 4, 121)])
def test_every_response_with_its_probability(vocabulary: int, length: int, count: int):
    space = exact.space_of(vocabulary, length)
    logits_SV = random_logits(space, seed=length)
    walked = walk(logits_SV.numpy(), vocabulary, length)
    assert len(space) == len(walked) == count
    probability_B = exact.response_logp(space, logits_SV).exp().tolist()
    assert dict(zip(as_tuples(space), probability_B, strict=True)) == pytest.approx(walked)
    assert sum(probability_B) == pytest.approx(1)


def test_the_policy_gradient_is_the_slope_of_the_expected_reward():
    space = exact.space_of(3, 3)
    logits_SV = random_logits(space, seed=0)
    reward = np.random.default_rng(0).random(len(space))
    names = as_tuples(space)

    def expected(logits: np.ndarray) -> float:
        walked = walk(logits, 3, 3)
        return sum(walked[name] * r for name, r in zip(names, reward, strict=True))

    gradient_SV = exact.policy_gradient(space, logits_SV, torch.from_numpy(reward)).numpy()
    for s, v in np.ndindex(gradient_SV.shape):
        step = np.zeros_like(gradient_SV)
        step[s, v] = 1e-5
        slope = (expected(logits_SV.numpy() + step) - expected(logits_SV.numpy() - step)) / 2e-5
        assert gradient_SV[s, v] == pytest.approx(slope, abs=1e-9)


def test_the_slope_of_every_token():
    space = exact.space_of(3, 3)
    logits_SV = random_logits(space, seed=5)
    wanted_BTSV = torch.autograd.functional.jacobian(lambda logits: exact.token_logp(space, logits), logits_SV)
    assert torch.allclose(exact.token_slope(space, logits_SV), wanted_BTSV, atol=1e-14)


def test_divergences_of_a_bandit_by_hand():
    space = exact.space_of(3, 1)
    pi = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    alpha = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    found = exact.divergences(space, pi, alpha)
    assert found["tv"] == found["tv_token"] == pytest.approx(0.25)
    assert found["kl"] == found["kl_reverse"] == pytest.approx(0.25 * math.log(2))
    assert found["chi2"] == pytest.approx(0.25 / 0.25 + 0.0625 / 0.25 + 0.0625 / 0.5 - 1)
    assert found["ess"] == pytest.approx(1 / 1.375)


def test_the_estimators_converge_to_the_exact_divergences():
    """Oracle 7. A million responses of α; each tolerance is six standard errors of a bounded or moderate variable."""
    space = exact.space_of(3, 3)
    pi, alpha = random_logits(space, 1, 0.6), random_logits(space, 2, 0.6)
    names, walked_pi, walked_alpha = as_tuples(space), walk(pi.numpy(), 3, 3), walk(alpha.numpy(), 3, 3)
    p, a = (np.array([walked[name] for name in names]) for walked in (walked_pi, walked_alpha))
    wanted = {
        "tv": np.abs(p - a).sum() / 2, "kl": (a * np.log(a / p)).sum(), "kl_reverse": (p * np.log(p / a)).sum(),
        "chi2": ((p - a) ** 2 / a).sum(), "ess": 1 / (p**2 / a).sum(),
    }  # fmt: skip
    found = exact.divergences(space, pi, alpha)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)

    count = 1_000_000
    drawn_B = torch.from_numpy(np.random.default_rng(3).choice(len(a), count, p=a / a.sum()))
    log_ratio_BT = (exact.token_logp(space, pi) - exact.token_logp(space, alpha))[drawn_B]
    mask_BT = space.mask_BT[drawn_B]
    response_BT = torch.arange(count)[:, None].expand_as(mask_BT)
    estimated = LogRatios(log_ratio_BT[mask_BT].numpy(), response_BT[mask_BT].numpy(), np.ones(count)).divergences()
    w = p / a
    ratio_BT = torch.where(space.mask_BT, exact.token_logp(space, pi) - exact.token_logp(space, alpha), 0.0).numpy()
    by_token = (np.exp(ratio_BT) - 1 - ratio_BT).sum(-1)
    error = {
        name: 6 * math.sqrt((a * (value - (a * value).sum()) ** 2).sum() / count)
        for name, value in {"tv": np.maximum(1 - w, 0), "kl": by_token, "chi2": (w - 1) ** 2}.items()
    }
    assert estimated["tv_sequence"] == pytest.approx(wanted["tv"], abs=error["tv"])
    assert estimated["kl"] == pytest.approx(wanted["kl"], abs=error["kl"])
    assert estimated["chi2"] == pytest.approx(wanted["chi2"], abs=error["chi2"])
    assert estimated["ess"] == pytest.approx(wanted["ess"], abs=2 * error["chi2"] * wanted["ess"] ** 2)
    assert estimated["tv_token"] == pytest.approx(found["tv_token"], abs=6 / math.sqrt(count))
    assert max(error.values()) < 0.05 < wanted["tv"]


def test_groups_are_weighed_like_all_ordered_groups():
    """E[f] over multisets is that over all 3⁴ orders, for an f that does not see the order."""
    alpha = [0.2, 0.5, 0.3]
    reward = [0.0, 1.0, 0.7]
    groups = exact.groups(torch.tensor(alpha, dtype=torch.float64), 4, 1000, torch.Generator())
    assert groups.exact
    assert len(groups.member_MG) == math.comb(6, 4)
    assert groups.weight_M.sum().item() == pytest.approx(1)
    value_M = torch.tensor(reward, dtype=torch.float64)[groups.member_MG].std(1, correction=0)
    wanted = sum(
        math.prod(alpha[y] for y in group) * np.std([reward[y] for y in group])
        for group in itertools.product(range(3), repeat=4)
    )
    assert groups.mean(value_M).item() == pytest.approx(wanted)


def test_too_many_groups_are_drawn_instead():
    alpha_B = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    groups = exact.groups(alpha_B, 32, 500, torch.Generator().manual_seed(0))
    again = exact.groups(alpha_B, 32, 500, torch.Generator().manual_seed(0))
    assert not groups.exact
    assert groups.member_MG.shape == (500, 32)
    assert torch.equal(groups.member_MG, again.member_MG)
    share_B = torch.bincount(groups.member_MG.flatten()) / (500 * 32)
    assert share_B.tolist() == pytest.approx(alpha_B.tolist(), abs=0.03)
