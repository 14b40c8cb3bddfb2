"""What `docs/coming-from.md` calls TRL's loss in Solera's words: value and gradient against TRL 1.16's formulas.

They are written out here as TRL's trainer has them: padded arrays, a generation batch cut into micro-batches of equal
size, each divided by its own denominator, gradients added up.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from solera.config import ObjectiveConfig
from solera.objectives.objective import compose
from solera.objectives.padded import padded_loss
from solera.objectives.table import resolve

P, G, T = 4, 4, 7
LIMIT = 9
FLAT = 2
"""The group whose rewards are all equal."""
EPSILON, EPSILON_HIGH, CAP, BETA = 0.2, 0.3, 1.1, 0.07


@dataclass
class Generation:
    """A generation batch, its responses shuffled as TRL shuffles them before it cuts."""

    logp_BT: Tensor
    old_logp_BT: Tensor
    ref_logp_BT: Tensor
    mask_BT: Tensor
    reward_B: Tensor
    group_B: Tensor


@pytest.fixture(params=[0, 1, 2])
def generation(request) -> Generation:
    rng = np.random.default_rng(request.param)
    length_B = rng.integers(1, T + 1, P * G)
    reward_PG = rng.normal(size=(P, G))
    reward_PG[FLAT] = 0.7
    old_BT = -rng.exponential(size=(P * G, T))
    arrays = {
        "logp_BT": old_BT + rng.normal(scale=0.4, size=old_BT.shape),
        "old_logp_BT": old_BT,
        "ref_logp_BT": old_BT + rng.normal(scale=0.4, size=old_BT.shape),
        "mask_BT": np.arange(T) < length_B[:, None],
        "reward_B": reward_PG.ravel(),
        "group_B": np.arange(P).repeat(G),
    }
    order_B = rng.permutation(P * G)
    made = Generation(**{name: torch.from_numpy(array[order_B]) for name, array in arrays.items()})
    made.logp_BT.requires_grad_()
    return made


def trl_advantage(generation: Generation, scale_rewards: str) -> Tensor:
    """`(r − mean) / (std + 1e-4)`, std over G−1; without the division where rewards are not scaled."""
    advantage_B = torch.empty(P * G, dtype=torch.float64)
    for group in range(P):
        rows = (generation.group_B == group).nonzero().flatten()
        reward_G = generation.reward_B[rows].numpy()
        centred_G = reward_G - reward_G.mean()
        scale = reward_G.std(ddof=1) + 1e-4 if scale_rewards == "group" else 1.0
        advantage_B[rows] = torch.from_numpy(centred_G / scale)
    return advantage_B


def trl_token_loss(
    generation: Generation, loss_type: str, level: str, advantage_B: Tensor, beta: float, bias_correction: bool,
    delta: float | None,
) -> Tensor:  # fmt: skip
    """The loss of each token, or of each response where ratios are of whole responses. `[B, T]` or `[B, 1]`"""
    advantage_B1, mask_BT = advantage_B[:, None], generation.mask_BT.double()
    log_ratio_BT = generation.logp_BT - generation.old_logp_BT
    if level == "sequence":
        log_ratio_BT = ((log_ratio_BT * mask_BT).sum(1) / mask_BT.sum(1))[:, None]
    ratio_BT = log_ratio_BT.exp()
    if loss_type == "cispo":
        loss_BT = -ratio_BT.clamp(max=CAP).detach() * advantage_B1 * generation.logp_BT
    elif loss_type == "sapo":
        tau_B1 = torch.where(advantage_B1 > 0, torch.ones_like(advantage_B1), 1.05)
        loss_BT = -torch.sigmoid(tau_B1 * (ratio_BT - 1)) * 4 / tau_B1 * advantage_B1
    else:
        clipped_BT = ratio_BT.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
        bounded_BT = ratio_BT if delta is None else ratio_BT.clamp(max=delta)
        loss_BT = -torch.min(bounded_BT * advantage_B1, clipped_BT * advantage_B1)
    if beta:
        d_BT = generation.ref_logp_BT - generation.logp_BT
        kl_BT = d_BT.exp() - d_BT - 1
        loss_BT = loss_BT + beta * (kl_BT * ratio_BT if bias_correction else kl_BT)
    return loss_BT


def trl_loss(
    generation: Generation, loss_type: str, *, level: str = "token", scale_rewards: str = "group", beta: float = 0.0,
    bias_correction: bool = True, micro_batches: int = 1, delta: float | None = None,
) -> Tensor:  # fmt: skip
    """One optimiser step with `steps_per_generation = gradient_accumulation_steps = micro_batches`."""
    advantage_B = trl_advantage(generation, scale_rewards)
    loss_BT = trl_token_loss(generation, loss_type, level, advantage_B, beta, bias_correction, delta)
    mask_BT = generation.mask_BT.double()
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(P * G).chunk(micro_batches):
        sum_B, length_B = (loss_BT[rows] * mask_BT[rows]).sum(1), mask_BT[rows].sum(1)
        if loss_type in ("grpo", "sapo"):
            part = (sum_B / length_B).mean() / micro_batches
        elif loss_type == "bnpo":
            part = sum_B.sum() / length_B.sum() / micro_batches
        elif loss_type == "dr_grpo":
            part = sum_B.sum() / (len(rows) * LIMIT) / micro_batches
        elif loss_type == "luspo":
            part = sum_B.mean() / micro_batches
        else:
            part = sum_B.sum() / mask_BT.sum()
        total = total + part
    return total


def solera_loss(generation: Generation, **fields: Any) -> Tensor:
    objective = compose(resolve(ObjectiveConfig(**fields)))
    loss, _ = padded_loss(
        objective, logp_BT=generation.logp_BT, mask_BT=generation.mask_BT, reward_B=generation.reward_B,
        group_B=generation.group_B, behaviour_logp_BT=generation.old_logp_BT, ref_logp_BT=generation.ref_logp_BT,
        limit=LIMIT,
    )  # fmt: skip
    return loss


def gradient(loss: Tensor, generation: Generation) -> Tensor:
    return torch.autograd.grad(loss, generation.logp_BT)[0]


def assert_same(generation: Generation, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient(ours, generation), gradient(theirs, generation), rtol=1e-9, atol=1e-12)


BAND = {"epsilon_low": EPSILON, "epsilon_high": EPSILON_HIGH}
BESSEL = {"advantage": "whiten_bessel", "zero_variance_mask": False}
TRANSLATED: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", **BAND, **BESSEL},
    "bnpo": {"name": "grpo", "aggregation": "token_mean", **BAND, **BESSEL},
    "dapo": {"name": "dapo", **BAND, **BESSEL},
    "dr_grpo": {"name": "dr_grpo", **BAND, **BESSEL},
    "cispo": {"name": "cispo", "cap": CAP, **BESSEL},
    "sapo": {"name": "sapo", **BESSEL},
}
"""TRL's loss_type, with its other defaults, as an `[objective]` of Solera."""


@pytest.mark.parametrize("loss_type", TRANSLATED)
def test_loss_type(generation, loss_type):
    assert_same(generation, solera_loss(generation, **TRANSLATED[loss_type]), trl_loss(generation, loss_type))


@pytest.mark.parametrize("loss_type", [name for name in TRANSLATED if name != "bnpo"])
def test_micro_batches_of_trl_make_no_difference(generation, loss_type):
    theirs = trl_loss(generation, loss_type, micro_batches=4)
    assert_same(generation, solera_loss(generation, **TRANSLATED[loss_type]), theirs)


def test_but_to_bnpo_they_do(generation):
    ours = solera_loss(generation, **TRANSLATED["bnpo"])
    theirs = trl_loss(generation, "bnpo", micro_batches=4)
    assert not torch.allclose(gradient(ours, generation), gradient(theirs, generation), rtol=1e-2)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_rewards_not_scaled(generation, loss_type):
    fields = {**TRANSLATED[loss_type], "advantage": "mean"}
    assert_same(generation, solera_loss(generation, **fields), trl_loss(generation, loss_type, scale_rewards="none"))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("bias_correction", "kl_weight"), [(True, "importance"), (False, "none")])
def test_kl_to_the_reference(generation, loss_type, bias_correction, kl_weight):
    ours = solera_loss(generation, **TRANSLATED[loss_type], beta=BETA, kl="k3", kl_weight=kl_weight)
    assert_same(generation, ours, trl_loss(generation, loss_type, beta=BETA, bias_correction=bias_correction))


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("grpo", "sequence_mean"), ("luspo", "sequence_sum"), ("dapo", "token_mean")]
)
def test_ratios_of_whole_responses(generation, loss_type, aggregation):
    ours = solera_loss(generation, name="gspo", aggregation=aggregation, **BAND, **BESSEL)
    assert_same(generation, ours, trl_loss(generation, loss_type, level="sequence"))


@pytest.mark.parametrize("delta", [1 + EPSILON_HIGH, 1.6, 4.0])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_delta_is_the_dual_clip(generation, loss_type, delta):
    ours = solera_loss(generation, **TRANSLATED[loss_type], dual_clip=delta)
    assert_same(generation, ours, trl_loss(generation, loss_type, delta=delta))
    ours = solera_loss(generation, **TRANSLATED[loss_type], dual_clip=delta, beta=BETA)
    assert_same(generation, ours, trl_loss(generation, loss_type, delta=delta, beta=BETA))


def test_delta_bounds_ratios_of_whole_responses(generation):
    delta = 1 + EPSILON_HIGH
    ours = solera_loss(generation, name="gspo", dual_clip=delta, **BAND, **BESSEL)
    assert_same(generation, ours, trl_loss(generation, "grpo", level="sequence", delta=delta))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_leaving_flat_groups_out_lengthens_the_gradient_and_turns_it_nowhere(generation, loss_type):
    masked = {name: value for name, value in TRANSLATED[loss_type].items() if name != "zero_variance_mask"}
    token_B = generation.mask_BT.double().sum(1)
    left_B = generation.group_B != FLAT
    factor = token_B.sum() / token_B[left_B].sum() if loss_type == "dapo" else P / (P - 1)
    theirs = gradient(trl_loss(generation, loss_type), generation)
    ours = gradient(solera_loss(generation, **masked), generation)
    torch.testing.assert_close(ours, factor * theirs, rtol=1e-9, atol=1e-12)


def test_population_whitening_is_another_advantage(generation):
    ours = solera_loss(generation, **{**TRANSLATED["grpo"], "advantage": "whiten"})
    assert not torch.allclose(ours, trl_loss(generation, "grpo"), rtol=1e-2)
