"""Identities between objectives: docs/formulas.md, section 10, items 1, 2, 3, 4 and 8."""

from typing import Any

import pytest
import torch

from tests.objectives import batches
from tests.objectives.batches import Batch, padded
from tests.objectives.comparison import Outcome, assert_same, computed
from tests.objectives.oracle import TABLE

SAME: dict[str, Any] = {"advantage": "whiten", "aggregation": "sequence_mean", "zero_variance_mask": True}
OFF_POLICY = ("plain", "stale", "ties", "gaps", "huge", "edges")


def both(left: tuple[str, dict[str, Any]], right: tuple[str, dict[str, Any]], batch: Batch) -> tuple[Outcome, Outcome]:
    return computed(left[0], batch, 0, **left[1]), computed(right[0], batch, 0, **right[1])


def responses(batch: Batch) -> list[Any]:
    return [member for group in batch for member in group]


@pytest.mark.parametrize("kind", OFF_POLICY)
@pytest.mark.parametrize("seed", range(3))
def test_one_side_with_importance_has_the_gradient_of_ppo(kind, seed):
    edges = batches.edge_options()
    band = {"epsilon_low": edges["epsilon_low"], "epsilon_high": edges["epsilon_high"]}
    rec, ppo = both(
        ("reinforce", {"clip": "one_side", "weight": "importance"} | band | SAME),
        ("grpo", band | SAME),
        batches.KINDS[kind](seed),
    )
    assert ppo.grad_logp_BT.abs().max() > 0
    assert_same(rec.grad_logp_BT, ppo.grad_logp_BT, "gradient")


@pytest.mark.parametrize("kind", OFF_POLICY)
@pytest.mark.parametrize("epsilon", [0.2, 0.7])
def test_off_policy_around_one_is_ppo_for_any_behaviour(kind, epsilon):
    off_policy, ppo = both(
        ("off_policy_grpo", {"epsilon": epsilon} | SAME),
        ("grpo", {"epsilon_low": epsilon, "epsilon_high": epsilon} | SAME),
        batches.KINDS[kind](5),
    )
    assert_same(off_policy.value, ppo.value, "loss")
    assert_same(off_policy.grad_logp_BT, ppo.grad_logp_BT, "gradient")


@pytest.mark.parametrize("kind", OFF_POLICY)
def test_off_policy_around_the_proximal_is_ppo_where_it_wrote_the_batch(kind):
    batch = batches.KINDS[kind](6)
    for member in responses(batch):
        member.proximal = list(member.behaviour)
    off_policy, ppo = both(("off_policy_grpo", {"centre": "proximal"} | SAME), ("grpo", SAME), batch)
    assert_same(off_policy.value, ppo.value, "loss")
    assert_same(off_policy.grad_logp_BT, ppo.grad_logp_BT, "gradient")


@pytest.mark.parametrize("kind", [*OFF_POLICY, "on_policy"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
def test_asymre_is_the_mean_advantage_with_forward_kl(kind, aggregation):
    same = {"aggregation": aggregation, "zero_variance_mask": False}
    asymre, regularised = both(
        ("asymre", {"delta": -0.3} | same),
        ("reinforce", {"regulariser": "forward_kl", "regulariser_weight": 0.3} | same),
        batches.KINDS[kind](7),
    )
    assert_same(asymre.value, regularised.value, "loss")
    assert_same(asymre.grad_logp_BT, regularised.grad_logp_BT, "gradient")


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_pairwise_has_the_gradient_of_reinforce_where_the_drift_is_the_same(tau):
    batch = batches.stale(8)
    for g, group in enumerate(batch):
        for member in group:  # Σ(ℓ−f) = g + ½ in all of group g
            member.ref = [value - (g + 0.5) / member.n for value in member.logp.tolist()]
    got = computed("opmd_pairwise", batch, 0, tau=tau)
    _, rows = padded(batch, 0)
    want_BT = torch.zeros_like(got.grad_logp_BT)
    for group in batch:
        mean = sum(member.reward for member in group) / len(group)
        for member in group:
            b = next(b for b, other in enumerate(rows) if other is member)
            want_BT[b, member.tokens] = -(member.reward - mean) / len(batch)
    assert_same(got.grad_logp_BT, want_BT, "gradient")


@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_clipped_on_policy(name):
    assert computed(name, batches.on_policy(9), 0).clip_fraction == 0.0


@pytest.mark.parametrize(
    "name",
    ["dapo", "dr_grpo", "off_policy_grpo", "gspo", "cispo", "topr", "decoupled", "tis", "mis", "m2po", "dppo", "sapo"]
    + [name for name in TABLE if name.startswith("rec_")],
)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_every_surrogate_has_the_gradient_of_reinforce_on_policy(name, aggregation):
    same = SAME | {"aggregation": aggregation}
    surrogate, reinforce = both((name, same), ("reinforce", same), batches.on_policy(10))
    assert reinforce.grad_logp_BT.abs().max() > 0
    assert_same(surrogate.grad_logp_BT, reinforce.grad_logp_BT, "gradient")


@pytest.mark.parametrize("advantage", ["mean", "whiten", "whiten_bessel", "leave_one_out"])
@pytest.mark.parametrize("kind", ["plain", "stale", "ties", "gaps"])
def test_advantages_of_a_group_sum_to_zero(advantage, kind):
    """Read off the gradient: under sequence_sum a token of response i has −A_i/B."""
    batch = batches.KINDS[kind](11)
    got = computed("reinforce", batch, 0, advantage=advantage, aggregation="sequence_sum", zero_variance_mask=False)
    _, rows = padded(batch, 0)
    assert got.grad_logp_BT.abs().max() > 0
    for group in batch:
        places = [(b, row.tokens[0]) for b, row in enumerate(rows) if any(row is m for m in group) and row.tokens]
        assert sum(got.grad_logp_BT[place].item() for place in places) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("tau", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("kind", ["plain", "stale", "ties", "gaps", "huge"])
def test_kimi_has_the_gradient_of_logavgexp_with_k2_of_the_sequence(tau, kind):
    batch = batches.KINDS[kind](12)
    for member in responses(batch):
        member.behaviour = list(member.ref)
    options = {
        "advantage": "logavgexp", "advantage_tau": tau, "regulariser": "k2_sequence", "regulariser_weight": tau,
        "aggregation": "sequence_sum", "zero_variance_mask": False,
    }  # fmt: skip
    kimi, regularised = both(("opmd_kimi", {"tau": tau}), ("reinforce", options), batch)
    assert_same(kimi.grad_logp_BT / (2 * tau), regularised.grad_logp_BT, "gradient")
