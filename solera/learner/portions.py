"""What a rank receives of a batch, what it returns, and how the results of all ranks become one update.

Advantages and denominators belong to the whole minibatch, so every rank receives them whole. Tokens go only to the rank
that scores them. A learner in one process is the only rank.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.batch import Batch, FloatArray, Parts, Update
from solera.learner.contribution import shares
from solera.objectives.objective import Objective
from solera.objectives.token_statistics import TokenStatistics
from solera.objectives.tokens import Responses
from solera.records import Rollout


@dataclass(frozen=True, eq=False)
class Portion:
    """One rank's part of a minibatch. `responses` and `number_B` describe the whole minibatch.

    The minibatch's responses are numbered from 0: first those that are trained on, then those that are only watched.
    """

    responses: Responses
    number_B: Tensor
    """Number of each response of the minibatch in `Batch.scored`."""
    rollouts: tuple[Rollout, ...]
    """The responses that this rank scores."""
    place_R: Tensor
    """Their numbers in the minibatch."""
    parts: int
    """Of all responses of the batch (`batch.Parts`)."""
    part_P: npt.NDArray[np.int64]
    """The number in the batch of each part of `trained`."""
    turn_advantages: tuple[npt.NDArray[np.float64], ...] | None
    """The advantage of each token of each of `trained`, if turns have their own."""

    @property
    def trained(self) -> tuple[Rollout, ...]:
        """The responses of this rank that are trained on. They come before those that are only watched."""
        return self.rollouts[: int((self.place_R < len(self.responses.length_B)).sum())]


@dataclass(frozen=True, eq=False)
class Findings:
    """What one rank found while it learned from its portions of a batch."""

    rate: float
    """The learning rate."""
    steps: list[tuple[float, float]]
    """For each optimiser step: this rank's part of the loss, and the norm of the whole gradient."""
    statistics: TokenStatistics | None
    contribution: Tensor
    """What each part of a response did to the policy (`learner/contribution.py`), 0 for those of other ranks.
    `[3, P]`"""
    computed: int
    """Tokens of its forward passes, including padding."""
    log_ratio_T: FloatArray
    response_T: npt.NDArray[np.int64]


def portions_of(batch: Batch, objective: Objective, minibatches: int, limit: int, ranks: int) -> list[list[Portion]]:
    """The portions of each rank, one for each minibatch. Groups stay whole, and ranks get about equally many tokens."""
    each: list[list[Portion]] = [[] for _ in range(ranks)]
    written = Parts.of(batch.rollouts)
    for chosen in list(split(batch, minibatches)) or [range(0)]:
        for own, portion in zip(each, _portions(batch, written, chosen, objective, limit, ranks), strict=True):
            own.append(portion)
    return each


def conclude(batch: Batch, found: Sequence[Findings], version: int, lineage: str) -> Update:
    """The update that all ranks together made to the policy, which was at `version` before."""
    moved = reduce(operator.add, (each.contribution for each in found))
    metrics = shares(Parts.of(batch.rollouts), moved, version, lineage)
    statistics = [each.statistics for each in found if each.statistics is not None]
    metrics |= reduce(operator.add, statistics).metrics() if statistics else {}
    if steps := found[0].steps:
        losses = [sum(loss for loss, _ in together) for together in zip(*(each.steps for each in found), strict=True)]
        metrics["learn/loss"] = sum(losses) / len(steps)
        metrics["learn/grad_norm"] = sum(norm for _, norm in steps) / len(steps)
    metrics |= {"learn/lr": found[0].rate, "tokens/computed": sum(each.computed for each in found)}
    ratio_T, number_T = (np.concatenate([getattr(each, n) for each in found]) for n in ("log_ratio_T", "response_T"))
    return Update(metrics, ratio_T, number_T)


def split(batch: Batch, minibatches: int) -> Iterator[range]:
    """Responses of each minibatch: whole groups, as even as they go."""
    if not batch.groups:
        return
    count = min(minibatches, batch.groups)
    starts = [*np.searchsorted(batch.group_B, np.arange(batch.groups)).tolist(), len(batch.rollouts)]
    edges = [starts[round(m * batch.groups / count)] for m in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield range(start, stop)


def balance(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item. The largest items are placed first, each on the rank that has least.

    >>> balance([5, 9, 4, 1], 2)
    [1, 0, 1, 0]
    """
    owner, filled = [0] * len(sizes), [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owner[item] = filled.index(min(filled))
        filled[owner[item]] += sizes[item]
    return owner


def _portions(
    batch: Batch, written: Parts, chosen: range, objective: Objective, limit: int, ranks: int
) -> Iterator[Portion]:
    """The first minibatch brings the watched responses. They are scored with it and kept from the objective."""
    watched = batch.watched if chosen.start == 0 else ()
    rollouts = batch.rollouts[chosen.start : chosen.stop] + watched
    trained = len(batch.rollouts)
    number_B = torch.cat([torch.arange(chosen.start, chosen.stop), torch.arange(trained, trained + len(watched))])
    responses = _responses(batch, chosen, objective, limit)
    owner_R = np.array(_owners(batch.group_B[chosen.start : chosen.stop], watched, rollouts, ranks), np.int64)
    for rank in range(ranks):
        place_R = np.flatnonzero(owner_R == rank)
        own = tuple(rollouts[place] for place in place_R)
        trained_R = place_R[place_R < len(chosen)] + chosen.start
        part_P = np.flatnonzero(np.isin(written.response_P, trained_R))
        turns = batch.turn_advantages and tuple(batch.turn_advantages[number] for number in trained_R)
        place = torch.from_numpy(place_R)
        yield Portion(responses, number_B, own, place, len(written.response_P), part_P, turns)


def _responses(batch: Batch, chosen: range, objective: Objective, limit: int) -> Responses:
    """The loss's denominators are counted over the whole minibatch."""
    length_B = torch.tensor([batch.rollouts[number].length for number in chosen], dtype=torch.float64)
    advantage_B, reward_B, group_B = (
        torch.from_numpy(value_B[chosen.start : chosen.stop])
        for value_B in (batch.advantage_B, batch.reward_B, batch.group_B)
    )
    return Responses(
        advantage_B=advantage_B,
        reward_B=reward_B.float(),
        length_B=length_B.float(),
        group_B=group_B,
        groups=batch.groups,
        weight_B=objective.aggregation(length_B, group_B, limit).float(),
    )


def _owners(
    group_B: npt.NDArray[np.int64], watched: tuple[Rollout, ...], rollouts: tuple[Rollout, ...], ranks: int
) -> list[int]:
    """The rank of each response of a minibatch. Watched responses to one prompt stay together too."""
    if ranks == 1:
        return [0] * len(rollouts)
    names = [*group_B.tolist(), *(rollout.prompt_key for rollout in watched)]
    sizes: dict[int | str, int] = dict.fromkeys(names, 0)
    for name, rollout in zip(names, rollouts, strict=True):
        sizes[name] += sum(len(sequence.token_ids_T) for sequence in rollout.sequences)
    owner = dict(zip(sizes, balance(list(sizes.values()), ranks), strict=True))
    return [owner[name] for name in names]
