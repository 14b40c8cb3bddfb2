"""From drawn groups to what a step learns from: rewards to advantages, zero-variance groups masked, ages taken."""

from dataclasses import dataclass

import torch
from torch import Tensor

from solera.errors import SoleraError
from solera.objectives.advantage import zero_variance
from solera.objectives.objective import Objective
from solera.records import Group, Rollout, Use


@dataclass(frozen=True, eq=False)
class Batch:
    """The responses that take part in a step (`_B`), group by group, and the account of all that was drawn.

    `metrics` speak of every drawn rollout, masked groups included; `uses` too, or they would be drawn again.
    """

    rollouts: tuple[Rollout, ...]
    advantage_B: Tensor
    group_B: Tensor
    groups: int
    metrics: dict[str, float]
    uses: list[Use]


def collate(groups: list[Group], objective: Objective, *, now: int, lineage: str) -> Batch:
    """Advantages within each group; a missing reward or an empty response leaves its group before the baseline."""
    members = [
        (p, rollout, rollout.reward)
        for p, group in enumerate(groups)
        for rollout in group.rollouts
        if rollout.reward is not None and rollout.length
    ]
    reward_B = torch.tensor([reward for _, _, reward in members], dtype=torch.float64)
    group_B = torch.tensor([p for p, _, _ in members], dtype=torch.int64)
    flat_P = zero_variance(reward_B, group_B, len(groups))
    advantage_B = objective.advantage(reward_B, group_B, len(groups))
    takes_part_B = ~flat_P[group_B] if objective.zero_variance_mask else torch.ones_like(group_B, dtype=torch.bool)
    chosen = takes_part_B.nonzero()[:, 0].tolist()
    rollouts = tuple(members[b][1] for b in chosen)
    _need_behaviour(rollouts)
    taken, number_B = torch.unique(group_B[takes_part_B], return_inverse=True)
    advantage_of = {rollout.id: a for rollout, a in zip(rollouts, advantage_B[takes_part_B].tolist(), strict=True)}
    uses = [
        Use(rollout.id, now, rollout.age(now, lineage), advantage_of.get(rollout.id))
        for group in groups
        for rollout in group.rollouts
        if rollout.id is not None
    ]
    return Batch(
        rollouts=rollouts,
        advantage_B=advantage_B[takes_part_B],
        group_B=number_B,
        groups=len(taken),
        metrics=_account(groups, reward_B, flat_P, rollouts, uses),
        uses=uses,
    )


def count_live_groups(groups: list[Group]) -> int:
    """Groups whose rewards differ: those that a zero-variance mask leaves in."""
    return sum(len({r.reward for r in group.rollouts if r.reward is not None and r.length}) > 1 for group in groups)


def _account(
    groups: list[Group], reward_B: Tensor, flat_P: Tensor, trained: tuple[Rollout, ...], uses: list[Use]
) -> dict[str, float]:
    drawn = [rollout for group in groups for rollout in group.rollouts]
    ages = [use.age for use in uses if use.age is not None]
    metrics = {"tokens/trained": float(sum(rollout.length for rollout in trained)), "groups/drawn": float(len(groups))}
    if drawn:
        metrics["response/length"] = sum(rollout.length for rollout in drawn) / len(drawn)
        metrics["response/truncated"] = sum(rollout.finish_reason == "length" for rollout in drawn) / len(drawn)
        metrics["reward/zero_variance_fraction"] = flat_P.double().mean().item()
    if len(reward_B):
        metrics["reward/mean"] = reward_B.mean().item()
    if ages:
        metrics["age/mean"] = sum(ages) / len(ages)
        metrics["age/max"] = float(max(ages))
    return metrics


def _need_behaviour(rollouts: tuple[Rollout, ...]) -> None:
    for rollout in rollouts:
        if any(sequence.behaviour_logp_T is None for sequence in rollout.sequences):
            raise SoleraError(
                f"rollout {rollout.id} from {rollout.origin!r} has no log-probabilities of its own sampler, which the "
                "objective's ratio needs: leave it out of the draw"
            )
