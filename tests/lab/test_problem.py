"""The lab's own arithmetic, against enumeration by hand."""

import itertools
import math

import pytest
import torch

from solera.diagnosis.exact import groups, policy_gradient, response_logp
from solera.lab.objectives import named
from solera.lab.problem import WRONG_ARM, ascent, bandit, estimate, in_proportion, written_by


def test_a_group_in_proportion():
    assert in_proportion(torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64), 10).tolist() == [0] * 3 + [1] * 6 + [2]
    # 3.5, 2.8 and .7 of 7: the floors leave two places, for the remainders .8 and .7.
    assert in_proportion(torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64), 7).tolist() == [0] * 3 + [1] * 3 + [2]


def test_mean_and_variance_of_reinforce_over_all_groups_of_two():
    """−∇loss of a pair is ½ Σ (r_i − mean)·(e_{y_i} − π), written out over the nine ordered pairs."""
    space, logits_SV, reward_B = bandit(*WRONG_ARM)
    alpha, reward = WRONG_ARM
    policy = [0.2, 0.5, 0.3]
    policy_SV = torch.tensor([policy], dtype=torch.float64).log()
    pairs = {}
    for pair in itertools.product(range(3), repeat=2):
        mean = sum(reward[y] for y in pair) / 2
        pairs[pair] = [sum((reward[y] - mean) * ((y == arm) - policy[arm]) for y in pair) / 2 for arm in range(3)]
    weight = {pair: alpha[pair[0]] * alpha[pair[1]] for pair in pairs}
    wanted = [sum(weight[pair] * way[arm] for pair, way in pairs.items()) for arm in range(3)]
    variance = sum(weight[pair] * sum((way[arm] - wanted[arm]) ** 2 for arm in range(3)) for pair, way in pairs.items())
    everyone = groups(response_logp(space, logits_SV).exp(), 2, 100, torch.Generator())
    found = estimate(
        named("reinforce", zero_variance_mask=False),
        written_by(space, reward_B, logits_SV),
        policy_SV,
        everyone,
        torch.Generator(),
    )
    assert found.mean_SV[0].tolist() == pytest.approx(wanted)
    assert found.variance == pytest.approx(variance)
    assert found.noise == pytest.approx(math.sqrt(variance) / math.hypot(*wanted))


@pytest.mark.parametrize("size", [2, 3, 6])
def test_on_policy_leave_one_out_is_the_policy_gradient_and_the_mean_is_short(size: int):
    """Masked groups leave the denominator too, which lengthens the gradient by 1/P(rewards differ)."""
    space, logits_SV, reward_B = bandit(*WRONG_ARM)
    data = written_by(space, reward_B, logits_SV)
    everyone = groups(response_logp(space, logits_SV).exp(), size, 100, torch.Generator())
    exact_SV = policy_gradient(space, logits_SV, reward_B)
    found = {
        (name, mask): estimate(
            named(name, zero_variance_mask=mask), data, logits_SV, everyone, torch.Generator(), copies=1000
        ).mean_SV
        for name in ("rloo", "reinforce")
        for mask in (False, True)
    }
    differ = 1 - sum(p**size for p in WRONG_ARM[0])
    assert torch.allclose(found["rloo", False], exact_SV, rtol=1e-12)
    assert torch.allclose(found["reinforce", False], exact_SV * (size - 1) / size, rtol=1e-12)
    assert torch.allclose(found["rloo", True], exact_SV / differ, rtol=1e-3)
    assert torch.allclose(found["reinforce", True], exact_SV * (size - 1) / size / differ, rtol=1e-3)


def test_a_group_of_equal_rewards_moves_nothing():
    space, logits_SV, reward_B = bandit(*WRONG_ARM)
    data = written_by(space, reward_B, logits_SV)
    way_SV = ascent(named("grpo"), data, logits_SV, torch.tensor([1, 1, 1]), torch.zeros(3, dtype=torch.float64))
    assert not way_SV.any()


def test_the_clip_replaces_an_objectives_own():
    assert named("grpo", 0.4).term.keywords == {"epsilon_low": 0.4, "epsilon_high": 0.4, "dual_clip": None}
    assert named("grpo").term.keywords == {"epsilon_low": 0.2, "epsilon_high": 0.2, "dual_clip": None}
    assert named("reinforce", 0.4).term.keywords.get("epsilon_low") is None
