"""Terms against formulas written out for single numbers, gradients by hand, and exact expectations."""

import math

import pytest
import torch

from solera.config import AggregationName, KLName
from solera.objectives.aggregation import AGGREGATIONS
from solera.objectives.objective import compose
from solera.objectives.penalties import KL_ESTIMATORS, kl_loss
from solera.objectives.ratio import bounded_exp
from solera.objectives.table import ObjectiveConfig, resolve
from solera.objectives.terms import off_policy, ppo
from solera.objectives.tokens import Responses, Tokens

LENGTHS = [3, 1, 5, 2, 4]
RESPONSES = len(LENGTHS)


def random_tokens(seed: int, spread: float = 0.6, **replaced) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    response_T = torch.repeat_interleave(torch.arange(RESPONSES), torch.tensor(LENGTHS))
    count = len(response_T)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    behaviour = -normal(1.0).abs()
    fields = {
        "logp_T": (behaviour + normal(spread)).requires_grad_(),
        "behaviour_logp_T": behaviour,
        "proximal_logp_T": behaviour + normal(0.3),
        "response_T": response_T,
        "responses": Responses(
            advantage_B=torch.randn(RESPONSES, generator=generator, dtype=torch.float64),
            reward_B=torch.zeros(RESPONSES, dtype=torch.float64),
            length_B=torch.tensor(LENGTHS, dtype=torch.float64),
            group_B=torch.zeros(RESPONSES, dtype=torch.int64),
            groups=1,
            weight_B=torch.rand(RESPONSES, generator=generator, dtype=torch.float64),
        ),
        "entropy_T": normal(1.0).abs(),
        "ref_logp_T": behaviour + normal(0.5),
    }
    return Tokens(**{**fields, **replaced})


def single_tokens(advantages: list[float]) -> Responses:
    """Responses of one token each."""
    advantage_B = torch.tensor(advantages, dtype=torch.float64)
    ones = torch.ones_like(advantage_B)
    return Responses(advantage_B, ones, ones, torch.zeros(len(advantages), dtype=torch.int64), 1, ones)


def by_hand(tokens: Tokens, bounds, level: str) -> tuple[list[float], list[float]]:
    """Loss of each token and the gradient of their plain sum, from scalars: −min(ρA, clip(ρ)A)."""
    ell, b = tokens.logp_T.tolist(), tokens.behaviour_logp_T.tolist()
    response, advantage = tokens.response_T.tolist(), tokens.advantage_T.tolist()
    losses, gradient = [], [0.0] * len(ell)
    for t in range(len(ell)):
        own = [t] if level == "token" else [s for s in range(len(ell)) if response[s] == response[t]]
        ratio = math.exp(sum(ell[s] - b[s] for s in own))
        low, high = bounds(t, own)
        unclipped, clipped = ratio * advantage[t], min(max(ratio, low), high) * advantage[t]
        losses.append(-min(unclipped, clipped))
        if unclipped <= clipped:  # the ratio itself is what counts: d ratio / d ℓ_s = ratio
            for s in own:
                gradient[s] -= ratio * advantage[t]
    return losses, gradient


@pytest.mark.parametrize("seed", range(5))
def test_ppo_is_its_formula(seed):
    tokens = random_tokens(seed)
    term = ppo(tokens, epsilon_low=0.2, epsilon_high=0.3)
    losses, gradient = by_hand(tokens, lambda t, own: (0.8, 1.3), "token")
    assert term.loss_T.tolist() == pytest.approx(losses, abs=1e-12)
    term.loss_T.sum().backward()
    assert tokens.logp_T.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    assert term.silenced_T.any()
    assert not term.silenced_T.all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("centre", ["one", "proximal"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_off_policy_is_its_formula(seed, centre, level):
    tokens = random_tokens(seed)
    p, b = tokens.proximal_logp_T.tolist(), tokens.behaviour_logp_T.tolist()

    def bounds(t, own):
        middle = 1.0 if centre == "one" else math.exp(sum(p[s] - b[s] for s in own))
        return max(middle - 0.2, 0.0), middle + 0.2

    term = off_policy(tokens, epsilon=0.2, centre=centre, level=level)
    losses, gradient = by_hand(tokens, bounds, level)
    assert term.loss_T.tolist() == pytest.approx(losses, abs=1e-12)
    term.loss_T.sum().backward()
    assert tokens.logp_T.grad.tolist() == pytest.approx(gradient, abs=1e-12)


def test_off_policy_with_centre_one_is_ppo_and_with_centre_proximal_where_alpha_is_pi_k():
    tokens = random_tokens(0)
    expected = ppo(tokens, epsilon_low=0.2, epsilon_high=0.2)
    one = off_policy(tokens, epsilon=0.2, centre="one", level="token")
    assert torch.equal(one.loss_T, expected.loss_T)
    on_policy = random_tokens(0, proximal_logp_T=tokens.behaviour_logp_T)
    proximal = off_policy(on_policy, epsilon=0.2, centre="proximal", level="token")
    assert torch.allclose(proximal.loss_T, ppo(on_policy, epsilon_low=0.2, epsilon_high=0.2).loss_T, atol=1e-15)


@pytest.mark.parametrize("fields", [{}, {"dual_clip": 1.5}, {"beta": 0.1, "advantage": "mean"}])
def test_off_policy_grpo_with_its_default_centre_is_grpo_exactly(fields):
    for seed in range(5):
        outcomes = []
        for name in ("grpo", "off_policy_grpo"):
            tokens = random_tokens(seed, spread=1.5)
            loss, account = compose(resolve(ObjectiveConfig(name, **fields))).loss(tokens)
            loss.backward()
            outcomes.append((loss.item(), tokens.logp_T.grad.tolist(), account.metrics()))
        assert outcomes[0] == outcomes[1]


def test_on_the_edge_of_the_band_the_gradient_is_whole():
    logp_T = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, dtype=torch.float64)
    tokens = Tokens(logp_T, zeros, zeros, zeros, torch.tensor([0, 1]), single_tokens([1.0, -1.0]))
    ppo(tokens, epsilon_low=0.0, epsilon_high=0.0).loss_T.sum().backward()  # ρ = 1 lies on both edges
    assert logp_T.grad.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("log_ratio", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("name", ["grpo", "off_policy_grpo"])
def test_huge_ratios_give_finite_losses_and_the_gradient_passes(name, log_ratio):
    exponent = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    bounded_exp(exponent).backward()
    assert exponent.grad.item() == pytest.approx(math.exp(math.copysign(20.0, log_ratio)))
    tokens = random_tokens(0)
    tokens = random_tokens(0, logp_T=(tokens.behaviour_logp_T + log_ratio).requires_grad_())
    loss, _ = compose(resolve(ObjectiveConfig(name, beta=0.1, entropy_bonus=0.01))).loss(tokens)
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(tokens.logp_T.grad).all()


def test_kl_estimators_on_numbers():
    ell, f = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    values = {name: estimator(ell, f).item() for name, estimator in KL_ESTIMATORS.items()}
    assert values == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) + 0.5 - 1})


def exact_kl_gradient(kl: str, kl_weight: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E_α[loss] over a vocabulary of four, differentiated in the logits; beside it both divergences' own gradients."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    behaviour = torch.log_softmax(torch.tensor([0.1, 0.4, -0.3, 0.2], dtype=torch.float64), 0)
    ref = torch.log_softmax(torch.tensor([-0.5, 0.6, 0.0, 0.3], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    zeros = torch.zeros(4, dtype=torch.float64)
    tokens = Tokens(logp, behaviour, behaviour, zeros, torch.arange(4), single_tokens([0.0] * 4), ref)
    expectation = (behaviour.exp() * kl_loss(tokens, kl=kl, kl_weight=kl_weight)).sum()
    reverse, forward = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    return tuple(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (expectation, reverse, forward))


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_weighted_kl_has_the_gradient_of_kl_from_pi_to_the_reference_whoever_wrote_the_data(kl):
    estimated, reverse, _ = exact_kl_gradient(kl, "importance")
    assert torch.allclose(estimated, reverse, atol=1e-12)


def test_unweighted_k3_has_not():
    estimated, reverse, _ = exact_kl_gradient("k3", "none")
    assert not torch.allclose(estimated, reverse, atol=1e-3)


def test_aggregations_weigh_tokens_or_responses_alike():
    length_B, group_B = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64), torch.tensor([0, 0, 5])
    weights = {name: weigh(length_B, group_B, 10).tolist() for name, weigh in AGGREGATIONS.items()}
    assert weights.pop("sequence_mean") == pytest.approx([1 / 3, 1 / 9, 1 / 12])
    each = {name: values[0] for name, values in weights.items() if len(set(values)) == 1}
    assert each == pytest.approx(
        {"token_mean": 1 / 8, "sequence_sum": 1 / 3, "fixed_length": 1 / 30, "group_sum": 1 / 2}
    )


def test_loss_adds_penalties_under_the_aggregation():
    tokens = random_tokens(3)
    objective = compose(resolve(ObjectiveConfig("grpo", beta=0.25, kl="k2", kl_weight="none", entropy_bonus=0.5)))
    loss, account = objective.loss(tokens)
    d_T = tokens.ref_logp_T - tokens.logp_T
    policy_T = torch.tensor(by_hand(tokens, lambda t, own: (0.8, 1.2), "token")[0], dtype=torch.float64)
    expected = (
        (policy_T + 0.25 * d_T**2 / 2 - 0.5 * tokens.entropy_T) * tokens.responses.weight_B[tokens.response_T]
    ).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert account.metrics()["kl/ref"] == pytest.approx((d_T**2 / 2).mean().item())


def test_clip_fraction_counts_silenced_tokens_among_those_with_an_advantage():
    # Ratios e, e, 1/e, 1/e with advantages +, −, −, 0: the first and the third are silenced, the last takes no part.
    zeros = torch.zeros(4, dtype=torch.float64)
    logp_T = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    tokens = Tokens(logp_T, zeros, zeros, zeros, torch.arange(4), single_tokens([1.0, -1.0, -1.0, 0.0]))
    account = compose(resolve(ObjectiveConfig("grpo"))).loss(tokens)[1]
    # −min(ρA, clip(ρ)A): −1.2 of the first, e of the second and 0.8 of the third.
    size = 1.2 + math.e + 0.8
    expected = {
        "clip/fraction": 2 / 3, "clip/high": 1 / 3, "clip/low": 1 / 3, "clip/positive": 1.0, "clip/negative": 1 / 2,
        "tokens/masked": 3 / 4, "weight/mean": math.e / 3, "loss/positive_share": 1.2 / size,
        "loss/negative_share": (math.e + 0.8) / size, "policy/entropy": 0.0,
    }  # fmt: skip
    assert account.metrics() == pytest.approx(expected)
    assert (account + account).metrics() == pytest.approx(expected)


def test_a_dual_clip_silences_a_huge_ratio_of_negative_advantage():
    # log ρ = 25 counts as 20. Without the bound that token's gradient is e²⁰ = 4.9e8; with it 0, and its loss is 3.
    zeros = torch.zeros(4, dtype=torch.float64)
    logp_T = torch.tensor([25.0, 25.0, 0.5, -25.0], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(logp_T, zeros, zeros, zeros, torch.arange(4), single_tokens([-1.0, 1.0, -1.0, -1.0]))
    plain = ppo(tokens, epsilon_low=0.2, epsilon_high=0.2)
    plain.loss_T.sum().backward()
    assert logp_T.grad.tolist() == pytest.approx([math.exp(20), 0.0, math.exp(0.5), 0.0])
    logp_T.grad = None
    bounded = ppo(tokens, epsilon_low=0.2, epsilon_high=0.2, dual_clip=3.0)
    bounded.loss_T.sum().backward()
    assert bounded.loss_T.tolist() == pytest.approx([3.0, -1.2, math.exp(0.5), 0.8])
    assert logp_T.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(0.5), 0.0])
    metrics = compose(resolve(ObjectiveConfig("grpo", dual_clip=3.0))).loss(tokens)[1].metrics()
    expected = {
        "clip/fraction": 3 / 4, "clip/high": 2 / 4, "clip/low": 1 / 4, "clip/positive": 1.0, "clip/negative": 2 / 3,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_every_name_of_the_config_has_a_function():
    assert set(KL_ESTIMATORS) == set(KLName.__args__)
    assert set(AGGREGATIONS) == set(AggregationName.__args__)
