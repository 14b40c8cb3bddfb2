"""What docs/coming-from.md calls a loss of verl, Trinity-RFT, AReaL or prime-rl: value and gradient by their formulas.

The formulas are written out here for single tokens. Rewards are taken as advantages, so that only the loss is compared.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from solera.config import ObjectiveConfig
from solera.objectives.objective import compose
from solera.objectives.padded import padded_loss
from solera.objectives.table import resolve

B, T = 12, 6
Batch = dict[str, Tensor]
Token = Callable[[Tensor, float, float, float], Tensor]
"""A token's loss from ℓ, b, p and A."""


@pytest.fixture(params=[0, 1, 2])
def batch(request) -> Batch:
    rng = np.random.default_rng(request.param)
    behaviour_BT = -rng.exponential(size=(B, T))
    made = {
        "logp_BT": behaviour_BT + rng.normal(scale=1.2, size=(B, T)),
        "behaviour_logp_BT": behaviour_BT,
        "proximal_logp_BT": behaviour_BT + rng.normal(scale=0.8, size=(B, T)),
        "mask_BT": np.arange(T) < rng.integers(1, T + 1, B)[:, None],
        "reward_B": rng.normal(size=B),
        "group_B": np.arange(B) // 4,
    }
    tensors = {name: torch.from_numpy(array) for name, array in made.items()}
    tensors["logp_BT"].requires_grad_()
    return tensors


def by_token(batch: Batch, loss: Token) -> Tensor:
    """The mean over all tokens."""
    losses = [
        loss(batch["logp_BT"][b, t], batch["behaviour_logp_BT"][b, t].item(), batch["proximal_logp_BT"][b, t].item(),
             batch["reward_B"][b].item())
        for b in range(B) for t in range(T) if batch["mask_BT"][b, t]
    ]  # fmt: skip
    return torch.stack(losses).mean()


def ours(batch: Batch, **fields: Any) -> Tensor:
    shared = {"advantage": "raw", "aggregation": "token_mean"}
    return padded_loss(compose(resolve(ObjectiveConfig(**shared | fields))), **batch)[0]


def assert_same(batch: Batch, mine: Tensor, theirs: Tensor, value: bool = True) -> None:
    if value:
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(loss, batch["logp_BT"])[0] for loss in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def dual_clipped(log_ratio: Tensor, A: float, low: float, high: float, c: float | None) -> Tensor:
    """The larger of two losses, and no more than −c·A where A < 0."""
    ratio = log_ratio.exp()
    loss = torch.maximum(-A * ratio, -A * ratio.clamp(1 - low, 1 + high))
    if c is not None and A < 0 and loss.item() > -A * c:
        return torch.zeros_like(loss) * log_ratio - A * c
    return loss


@pytest.mark.parametrize("c", [1.3, 2.0, 3.0])
def test_verl_vanilla_and_trinity_ppo(batch, c):
    theirs = by_token(batch, lambda ell, b, p, A: dual_clipped(ell - b, A, 0.2, 0.28, c))
    fields = {"name": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.28}
    assert_same(batch, ours(batch, **fields, dual_clip=c), theirs)
    unbounded = torch.autograd.grad(ours(batch, **fields), batch["logp_BT"])[0]
    bounded = torch.autograd.grad(ours(batch, **fields, dual_clip=c), batch["logp_BT"])[0]
    assert bounded.abs().max() < unbounded.abs().max()


@pytest.mark.parametrize("c", [None, 1.5])
@pytest.mark.parametrize(("action", "upper", "lower"), [("clamp", 2.0, 0.0), ("mask", 5.0, 0.0), ("mask", 2.0, 0.5)])
def test_areal_decoupled_loss_with_rejection_sampling(batch, c, action, upper, lower):
    def loss(ell: Tensor, b: float, p: float, A: float) -> Tensor:
        weight = math.exp(p - b)
        if action == "clamp":
            weight = min(weight, upper)
        elif not lower <= weight <= upper:
            weight = 0.0
        return weight * dual_clipped(ell - p, A, 0.2, 0.2, c)

    fields = {"name": "tis"} if action == "clamp" else {"name": "mis", "weight_low": lower}
    assert_same(batch, ours(batch, **fields, weight_high=upper, dual_clip=c), by_token(batch, loss))


def test_prime_rl_default_loss(batch):
    def loss(ell: Tensor, b: float, p: float, A: float) -> Tensor:
        moved = math.exp(ell.item()) - math.exp(b)
        kept = moved <= 0.2 if A > 0 else moved >= -0.2
        return -A * kept * (ell - b).exp() + 1e-3 * (ell - b) ** 2

    mine = ours(batch, name="dppo", tolerance=0.2, regulariser="k2_token", regulariser_weight=1e-3)
    assert_same(batch, mine, by_token(batch, loss))


def test_verl_dppo_tv_has_the_same_gradient(batch):
    def loss(ell: Tensor, b: float, p: float, A: float) -> Tensor:
        moved = math.exp(ell.item()) - math.exp(b)
        kept = moved <= 0.15 if A > 0 else moved >= -0.15
        return -A * kept * math.exp(ell.item() - b) * ell

    assert_same(batch, ours(batch, name="dppo", tolerance=0.15), by_token(batch, loss), value=False)


def test_verl_gpg_and_dro(batch):
    assert_same(batch, ours(batch, name="reinforce"), by_token(batch, lambda ell, b, p, A: -A * ell))
    theirs = by_token(batch, lambda ell, b, p, A: -A * ell + 0.5 * 0.3 * (ell - b) ** 2)
    assert_same(batch, ours(batch, name="opmd_k2", regulariser_weight=0.3 / 2), theirs)


def test_cispo_of_verl_trinity_and_areal_without_a_lower_bound(batch):
    theirs = by_token(batch, lambda ell, b, p, A: -A * min(math.exp(ell.item() - b), 1.28) * ell)
    assert_same(batch, ours(batch, name="cispo", cap=1.28), theirs)


def test_trinity_importance_sampling_and_token_topr(batch):
    theirs = by_token(batch, lambda ell, b, p, A: -A * (ell - b).exp())
    assert_same(batch, ours(batch, name="reinforce", weight="importance"), theirs, value=False)
    tapered = by_token(batch, lambda ell, b, p, A: -A * (1.0 if A > 0 else min(math.exp(ell.item() - b), 1.0)) * ell)
    assert_same(batch, ours(batch, name="topr", level="token"), tapered)


def test_trinity_rec_one_side_with_importance_sampling(batch):
    def loss(ell: Tensor, b: float, p: float, A: float) -> Tensor:
        ratio = math.exp(ell.item() - b)
        kept = ratio <= 1.2 if A >= 0 else ratio >= 0.8
        return -A * kept * ratio * ell

    assert_same(batch, ours(batch, name="rec_oneside_is"), by_token(batch, loss))
