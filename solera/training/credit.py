"""Credit for turns: each turn's return-to-go, compared with the same turn of the group's other members.

(docs/formulas.md, section 1)
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.objectives.advantage import Advantage, group_size, zero_variance
from solera.records import Reward, Rollout

FloatVector = npt.NDArray[np.float64]


def turn_of_tokens(rollout: Rollout) -> npt.NDArray[np.int64]:
    """The number of the turn, from 0, of each token that the policy wrote. A turn is what it wrote without
    interruption."""
    lengths, end = list[int](), None
    for number, sequence in enumerate(rollout.sequences):
        for start, stop, _ in sequence.spans:
            if end == (number, start):
                lengths[-1] += stop - start
            else:
                lengths.append(stop - start)
            end = (number, stop)
    return np.repeat(np.arange(len(lengths)), lengths)


def returns_to_go(rollout: Rollout) -> FloatVector:
    """`G_k = Σ_{j ≥ k} r_j`, the rewards of turn k and all later ones. A reward without a position belongs to the last
    turn, so every turn's return has it."""
    turn_T = turn_of_tokens(rollout)
    reward_K = np.zeros(turn_T[-1] + 1)
    starts = np.cumsum([0, *(sequence.length for sequence in rollout.sequences)])
    for reward in _latest(rollout):
        reward_K[_turn(reward, turn_T, starts)] += reward.value
    return reward_K[::-1].cumsum()[::-1]


def _latest(rollout: Rollout) -> list[Reward]:
    latest: dict[str, Reward] = {}
    for reward in rollout.rewards:
        held = latest.get(reward.part)
        if held is None or reward.revision >= held.revision:
            latest[reward.part] = reward
    return list(latest.values())


def _turn(reward: Reward, turn_T: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> int:
    if reward.position is None:
        return int(turn_T[-1])
    sequence = min(reward.sequence or 0, len(starts) - 2)
    place = starts[sequence] + reward.position
    return int(turn_T[min(place, starts[sequence + 1] - 1, len(turn_T) - 1)])


def flat_groups(rollouts: Sequence[Rollout], group_B: Tensor, groups: int) -> Tensor:
    """Which groups have equal returns at every turn that several members reached. `[P]`"""
    flat_P = torch.ones(groups, dtype=torch.bool)
    for reached_N, return_N in _by_turn(rollouts):
        flat_P &= zero_variance(return_N, group_B[reached_N], groups)
    return flat_P


def turn_advantages(
    rollouts: Sequence[Rollout], group_B: Tensor, groups: int, advantage: Advantage
) -> tuple[FloatVector, ...]:
    """The advantage of each token: that of its turn's return among the members of its group that reached the turn, 0 if
    no other did. One array per rollout, with its tokens in the order in which they were written."""
    turn_BT = [turn_of_tokens(rollout) for rollout in rollouts]
    value_BK = [np.zeros(turn_T[-1] + 1) for turn_T in turn_BT]
    for turn, (reached_N, return_N) in enumerate(_by_turn(rollouts)):
        group_N = group_B[reached_N]
        alone_N = group_size(group_N, groups) < 2
        found_N = advantage(return_N, group_N, groups).masked_fill(alone_N, 0.0)
        for place, value in zip(reached_N.tolist(), found_N.tolist(), strict=True):
            value_BK[place][turn] = value
    return tuple(value_K[turn_T] for value_K, turn_T in zip(value_BK, turn_BT, strict=True))


def _by_turn(rollouts: Sequence[Rollout]) -> list[tuple[Tensor, Tensor]]:
    """For each turn: the rollouts that reached it, and their returns from there on."""
    return_BK = [returns_to_go(rollout) for rollout in rollouts]
    found = []
    for turn in range(max(map(len, return_BK), default=0)):
        reached = [place for place, return_K in enumerate(return_BK) if len(return_K) > turn]
        returns = torch.tensor([return_BK[place][turn] for place in reached], dtype=torch.float64)
        found.append((torch.tensor(reached, dtype=torch.int64), returns))
    return found
