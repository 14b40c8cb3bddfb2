"""From drawn groups to what a step learns from: rewards to advantages, zero-variance groups masked, ages taken."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

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


class Member(NamedTuple):
    """A drawn rollout with what is asked of it more than once."""

    group: int
    rollout: Rollout
    reward: float | None
    length: int
    age: int | None


def collate(
    groups: list[Group], objective: Objective, *, now: int, lineage: str, mask_truncated: bool = False
) -> Batch:
    """Advantages within each group; a missing reward or an empty response leaves its group before the baseline, and
    with `mask_truncated` a response cut off by the length limit does too."""
    drawn = [
        Member(p, rollout, rollout.reward, rollout.length, rollout.age(now, lineage))
        for p, group in enumerate(groups)
        for rollout in group.rollouts
    ]
    masked = "length" if mask_truncated else None
    compared = [m for m in drawn if m.reward is not None and m.length and m.rollout.finish_reason != masked]
    reward_B = torch.tensor([member.reward for member in compared], dtype=torch.float64)
    group_B = torch.tensor([member.group for member in compared], dtype=torch.int64)
    flat_P = zero_variance(reward_B, group_B, len(groups))
    advantage_B = objective.advantage(reward_B, group_B, len(groups))
    taken_B = ~flat_P[group_B] if objective.zero_variance_mask else torch.ones_like(group_B, dtype=torch.bool)
    trained = [member for member, taken in zip(compared, taken_B.tolist(), strict=True) if taken]
    _need_behaviour(trained)
    advantage_B = advantage_B[taken_B]
    number_B = torch.unique(group_B[taken_B], return_inverse=True)[1]
    advantage_of = {id(member): a for member, a in zip(trained, advantage_B.tolist(), strict=True)}
    return Batch(
        rollouts=tuple(member.rollout for member in trained),
        advantage_B=advantage_B,
        group_B=number_B,
        groups=int(number_B.max()) + 1 if trained else 0,
        metrics=_account(drawn, trained, reward_B, flat_P, torch.unique(group_B)),
        uses=[
            Use(member.rollout.id, now, member.age, advantage_of.get(id(member)))
            for member in drawn
            if member.rollout.id is not None
        ],
    )


def count_live_groups(groups: list[Group], mask_truncated: bool = False) -> int:
    """Groups whose rewards differ: those that a zero-variance mask leaves in."""
    masked = "length" if mask_truncated else None
    return sum(
        len({r.reward for r in group.rollouts if r.reward is not None and r.length and r.finish_reason != masked}) > 1
        for group in groups
    )


def mean_parts(drawn: list[Member]) -> dict[str, float]:
    """The mean of each part of the rewards, over the responses that have it, where there is more than one part."""
    if len({reward.part for member in drawn for reward in member.rollout.rewards}) < 2:
        return {}
    values = defaultdict[str, list[float]](list)
    for member in drawn:
        for part, value in member.rollout.parts.items():
            values[part].append(value)
    return {f"reward/{part}": sum(v) / len(v) for part, v in values.items()}


def _account(
    drawn: list[Member], trained: list[Member], reward_B: Tensor, flat_P: Tensor, graded_P: Tensor
) -> dict[str, float]:
    ages = [member.age for member in drawn if member.age is not None]
    metrics: dict[str, float] = {"tokens/trained": sum(m.length for m in trained), "groups/drawn": len(flat_P)}
    if drawn:
        metrics["response/length"] = sum(member.length for member in drawn) / len(drawn)
        metrics["response/truncated"] = sum(m.rollout.finish_reason == "length" for m in drawn) / len(drawn)
    if len(reward_B):
        metrics["reward/mean"] = reward_B.mean().item()
        metrics["reward/zero_variance_fraction"] = flat_P[graded_P].double().mean().item()
        metrics |= mean_parts(drawn)
    if ages:
        metrics["age/mean"] = sum(ages) / len(ages)
        metrics["age/max"] = max(ages)
    return metrics


def _need_behaviour(trained: list[Member]) -> None:
    for rollout in (member.rollout for member in trained):
        if any(sequence.span_logp is None for sequence in rollout.sequences):
            raise SoleraError(
                f"rollout {rollout.id} from {rollout.origin!r} has no log-probabilities of its own sampler, which the "
                "objective's ratio needs: leave it out of the draw"
            )
        if rollout.sampling is not None and rollout.sampling.truncated:
            raise SoleraError(
                f"rollout {rollout.id} was sampled greedily or with top_p below 1: what its sampler could not draw has "
                "no probability to correct for; leave it out of the draw"
            )
