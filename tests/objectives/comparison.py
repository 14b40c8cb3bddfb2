"""Both sides of a comparison on the same batch: value, gradients and clip fraction."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solera.config import ObjectiveConfig
from solera.objectives.objective import compose
from solera.objectives.padded import padded_loss
from solera.objectives.table import resolve
from tests.objectives import oracle
from tests.objectives.batches import Batch, padded
from tests.objectives.oracle import Response

LIMIT = 9
RELATIVE = 1e-6


@dataclass
class Outcome:
    value: Tensor
    grad_logp_BT: Tensor
    grad_entropy_BT: Tensor
    clip_fraction: float


def computed(name: str, batch: Batch, row_seed: int, **options: Any) -> Outcome:
    """What `padded_loss` says."""
    return _computed(name, padded(batch, row_seed)[0], options)


def _computed(name: str, arguments: dict[str, Any], options: dict[str, Any]) -> Outcome:
    refill = {"refill": False} if name == "dapo" else {}  # it would ask for the mask; drawing is not under test here
    objective = compose(resolve(ObjectiveConfig(name=name, **refill, **options)))
    loss, metrics = padded_loss(objective, limit=LIMIT, **arguments)
    if loss.requires_grad:
        loss.backward()
    grads = [arguments[key].grad for key in ("logp_BT", "entropy_BT")]
    zeros = torch.zeros(arguments["mask_BT"].shape, dtype=torch.float64)
    logp, entropy = (zeros if grad is None else grad for grad in grads)
    return Outcome(loss.detach(), logp, entropy, float(metrics.get("clip/fraction", 0.0)))


def _expected(name: str, batch: Batch, rows: list[Response], shape: torch.Size, options: dict[str, Any]) -> Outcome:
    """What the oracle says, gradients laid out as `padded` lays out the rows."""
    for member in rows:
        member.logp = member.logp.detach().requires_grad_()
        member.entropy = member.entropy.detach().requires_grad_()
    loss = oracle.loss(name, batch, limit=LIMIT, **options)
    if loss is not None and loss.requires_grad:
        loss.backward()
    grads = [torch.zeros(shape, dtype=torch.float64) for _ in range(2)]
    for b, member in enumerate(rows):
        for grad_BT, leaf in zip(grads, (member.logp, member.entropy), strict=True):
            if leaf.grad is not None:
                grad_BT[b, : len(leaf)] = leaf.grad
    value = torch.zeros((), dtype=torch.float64) if loss is None else loss.detach()
    with torch.no_grad():
        clipped = oracle.clip_fraction(name, batch, limit=LIMIT, **options)
    return Outcome(value, *grads, clipped)


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    """Equal to 1e-6 relative, each number; sums that cancel may differ by rounding of the largest."""
    assert torch.isfinite(got).all(), f"{what}: {got.tolist()}, expected {want.tolist()}"
    allowed = RELATIVE * want.abs() + 1e-12 * want.abs().max() + 1e-13
    assert ((got - want).abs() <= allowed).all(), f"{what}: {got.tolist()}, expected {want.tolist()}"


def assert_agree(name: str, batch: Batch, row_seed: int, label: str, **options: Any) -> None:
    arguments, rows = padded(batch, row_seed)
    want = _expected(name, batch, rows, arguments["mask_BT"].shape, options)
    got = _computed(name, arguments, options)
    where = f"{name} {options} on {label}"
    assert_same(got.value, want.value, f"{where}: loss")
    assert_same(got.grad_logp_BT, want.grad_logp_BT, f"{where}: gradient of logp")
    assert_same(got.grad_entropy_BT, want.grad_entropy_BT, f"{where}: gradient of entropy")
    assert abs(got.clip_fraction - want.clip_fraction) < 1e-12, (
        f"{where}: clip fraction {got.clip_fraction}, expected {want.clip_fraction}"
    )
