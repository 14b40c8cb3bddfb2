"""From drawn groups to the batch that a step learns from: advantages, masked groups, dropped responses, ages."""

import math
from collections import defaultdict
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.batch import Batch
from solera.errors import SoleraError
from solera.objectives.advantage import zero_variance
from solera.objectives.objective import Objective, Shaped
from solera.records import Group, Rollout, Use
from solera.streams import stream_seed, uniforms
from solera.training.credit import flat_groups, turn_advantages

WATCHED_SHARE = 16
"""One masked group in so many is watched, and at least one."""


class Member(NamedTuple):
    """A drawn rollout with what is asked of it more than once."""

    group: int
    rollout: Rollout
    reward: float | None
    length: int
    age: int | None

    def compares(self, mask_truncated: bool) -> bool:
        """Whether the response takes part in its group at all."""
        truncated = mask_truncated and self.rollout.finish_reason == "length"
        return self.reward is not None and self.length > 0 and not truncated


def collate(
    groups: list[Group], objective: Objective, *, now: int, lineage: str, seed: int, mask_truncated: bool = False
) -> Batch:
    """Compute advantages within each group. A response without a reward, an empty one, and with `mask_truncated` one
    that was cut off by the length limit leave their group before the baseline is taken.

    `seed` is the run's. With `now` it gives the random numbers of RED-Drop and chooses the groups to watch.
    """
    drawn = [
        Member(p, rollout, rollout.reward, rollout.length, rollout.age(now, lineage))
        for p, group in enumerate(groups)
        for rollout in group.rollouts
    ]
    compared = [member for member in drawn if member.compares(mask_truncated)]
    reward_B = torch.tensor([member.reward for member in compared], dtype=torch.float64)
    group_B = torch.tensor([member.group for member in compared], dtype=torch.int64)
    several = [member.rollout for member in compared]
    flat = (
        flat_groups(several, group_B, len(groups))
        if objective.by_turn
        else zero_variance(reward_B, group_B, len(groups))
    )
    shaped = objective.shape(reward_B, group_B, len(groups), _uniforms(objective, compared, seed, now), flat)
    taken = shaped.taken_B.tolist()
    trained = [member.rollout for member, takes_part in zip(compared, taken, strict=True) if takes_part]
    need_behaviour(trained, objective)
    flat_P = flat.tolist()
    masked = [member for member in compared if flat_P[member.group]] if objective.zero_variance_mask else []
    known = [member for member in masked if member.rollout.known]
    watched = _watched(known, seed, now)
    number_B = torch.unique(group_B[shaped.taken_B], return_inverse=True)[1]
    return Batch(
        rollouts=tuple(trained),
        advantage_B=shaped.advantage_B[shaped.taken_B].numpy(),
        reward_B=reward_B[shaped.taken_B].numpy(),
        group_B=number_B.numpy(),
        groups=int(number_B.max()) + 1 if trained else 0,
        metrics=_of_drawn(drawn, len(groups), now)
        | _of_rewards(compared, flat_P)
        | mean_parts(drawn)
        | {
            "tokens/trained": sum([rollout.length for rollout in trained]),
            "responses/dropped": shaped.dropped_B.sum().item() / max(1, len(drawn)),
        }
        | _waste(drawn, compared, taken, shaped.dropped_B.tolist(), {member.group for member in masked}),
        uses=_uses(drawn, compared, taken, shaped.advantage_B.tolist(), now),
        watched=watched,
        turn_advantages=_turn_advantages(several, group_B, shaped, objective, len(groups)),
        watched_for=len(known) / len(watched) if watched else 0.0,
    )


def _turn_advantages(
    rollouts: list[Rollout], group_B: Tensor, shaped: Shaped, objective: Objective, groups: int
) -> tuple[npt.NDArray[np.float64], ...] | None:
    """Of the responses that take part. Those that RED-Drop removed count in no baseline and have advantages of 0."""
    if not objective.by_turn:
        return None
    assert objective.advantage is not None
    left_B = shaped.taken_B & ~shaped.dropped_B
    left = [rollout for rollout, stays in zip(rollouts, left_B.tolist(), strict=True) if stays]
    found = iter(turn_advantages(left, group_B[left_B], groups, objective.advantage))
    taken = zip(rollouts, shaped.taken_B.tolist(), left_B.tolist(), strict=True)
    return tuple(next(found) if stays else np.zeros(rollout.length) for rollout, takes, stays in taken if takes)


def count_live_groups(groups: list[Group], mask_truncated: bool = False) -> int:
    """Groups whose rewards differ: those that a zero-variance mask leaves in."""
    members = [[Member(0, r, r.reward, r.length, None) for r in group.rollouts] for group in groups]
    return sum(len({m.reward for m in several if m.compares(mask_truncated)}) > 1 for several in members)


def _uniforms(objective: Objective, compared: list[Member], seed: int, now: int) -> Tensor | None:
    """A random number for each response, where the objective drops some."""
    if objective.drop == "none":
        return None
    return torch.from_numpy(uniforms(np.array([stream_seed(seed, now)], np.uint64), len(compared))[0])


def _uses(
    drawn: list[Member], compared: list[Member], taken: list[bool], advantage: list[float], now: int
) -> list[Use]:
    """Everything drawn was used, though some of it took no part."""
    part = {id(m): a for m, takes_part, a in zip(compared, taken, advantage, strict=True) if takes_part}
    return [
        Use(m.rollout.id, now, m.age, part.get(id(m)), m.rollout.revision) for m in drawn if m.rollout.id is not None
    ]


def _waste(
    drawn: list[Member], compared: list[Member], taken: list[bool], dropped: list[bool], masked: set[int]
) -> dict[str, float]:
    """Tokens drawn with a grade, and of the drawn ones that teach nothing, how many for which reason."""
    graded = sum([member.length for member in drawn if member.reward is not None])
    lost: dict[str, float] = defaultdict(float)
    lost["waste/zero_variance"] = 0
    for member, takes_part, drops in zip(compared, taken, dropped, strict=True):
        if not takes_part:
            reason = "dropped" if drops else "zero_variance" if member.group in masked else "left_out"
            lost[f"waste/{reason}"] += member.length
    if len(compared) < len(drawn):
        inside = set(map(id, compared))
        for member in drawn:
            if id(member) not in inside:
                lost["waste/ungraded" if member.reward is None else "waste/truncated"] += member.length
    return {"tokens/graded": graded, **lost}


def mean_parts(drawn: list[Member]) -> dict[str, float]:
    """The mean of each part of the rewards, over the responses that have it, where there is more than one part."""
    if all(len(member.rollout.rewards) < 2 for member in drawn):
        return {}
    values = defaultdict[str, list[float]](list)
    for member in drawn:
        for part, value in member.rollout.parts.items():
            values[part].append(value)
    return {f"reward/{part}": sum(v) / len(v) for part, v in values.items()}


def _watched(known: list[Member], seed: int, now: int) -> tuple[Rollout, ...]:
    """All responses of a few masked groups, drawn by the run's seed; `known` are those of which a divergence tells."""
    numbers = list(dict.fromkeys(member.group for member in known))
    chosen = Random(stream_seed(seed, now, 1)).sample(numbers, -(-len(numbers) // WATCHED_SHARE))
    return tuple(member.rollout for member in known if member.group in chosen)


def _of_drawn(drawn: list[Member], groups: int, now: int) -> dict[str, float]:
    metrics: dict[str, float] = {"groups/drawn": groups}
    if drawn:
        metrics["response/length"] = sum([member.length for member in drawn]) / len(drawn)
        metrics["response/truncated"] = sum([m.rollout.finish_reason == "length" for m in drawn]) / len(drawn)
    if ages := [member.age for member in drawn if member.age is not None]:
        metrics["age/mean"] = sum(_mean_age(member, now) for member in drawn if member.age is not None) / len(ages)
        metrics["age/max"] = max(ages)
        if mixed := sum(member.rollout.mixed for member in drawn if member.age is not None):
            metrics["age/mixed"] = mixed / len(ages)
    return metrics


def _mean_age(member: Member, now: int) -> float:
    """The mean age of a response's tokens. Several versions may have written them."""
    assert member.age is not None
    if not member.rollout.mixed:
        return member.age
    spans = [span for sequence in member.rollout.sequences for span in sequence.spans]
    return now - sum([version * (stop - start) for start, stop, version in spans]) / member.length


def _of_rewards(compared: list[Member], flat_P: list[bool]) -> dict[str, float]:
    if not compared:
        return {}
    flat = [flat_P[group] for group in {member.group for member in compared}]
    mean = math.fsum([member.reward for member in compared if member.reward is not None]) / len(compared)
    return {"reward/mean": mean, "reward/zero_variance_fraction": sum(flat) / len(flat)}


def need_behaviour(rollouts: list[Rollout], objective: Objective) -> None:
    """Refuse what the objective cannot learn from: text whose author's probabilities it needs and does not have."""
    if not objective.uses_behaviour:
        return
    for rollout in rollouts:
        if not rollout.known and objective.unknown_behaviour == "refuse":
            raise SoleraError(
                f"{_name(rollout)} from {rollout.origin!r} has no log-probabilities of its own sampler, which the "
                "objective's ratio needs: choose an objective that asks for none, such as red_weight or asymre, set "
                "objective.unknown_behaviour = proximal, or leave it out of the draw"
            )
        if rollout.sampling is not None and rollout.sampling.truncated:
            raise SoleraError(
                f"{_name(rollout)} was sampled greedily or with top_p below 1: what its sampler could not draw has "
                "no probability to correct for; leave it out of the draw"
            )


def _name(rollout: Rollout) -> str:
    return "a rollout" if rollout.id is None else f"rollout {rollout.id}"
