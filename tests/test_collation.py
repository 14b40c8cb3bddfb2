"""Collating with responses cut off masked, and the means of a reward's parts."""

import dataclasses

import numpy as np
import pytest

from solera.config import ObjectiveConfig
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.records import Completion, Group, Prompt, Reward, Rollout
from solera.training.collation import collate, count_live_groups

OBJECTIVE = compose(resolve(ObjectiveConfig("grpo", advantage="mean", zero_variance_mask=True)))


def rollout(id_: int, finish: str, *rewards: Reward) -> Rollout:
    completion = Completion(np.array([5, 6], np.int32), np.zeros(2, np.float32), ((2, 0),), finish, "test")
    made = Rollout.of(Prompt("p", (3, 4)), completion, rewards=rewards)
    return dataclasses.replace(made, id=id_)


def test_masked_responses_leave_their_group_before_the_baseline():
    members = [rollout(1, "stop", Reward(1.0)), rollout(2, "length", Reward(9.0)), rollout(3, "stop", Reward(0.0))]
    group = Group("p", tuple(members))
    batch = collate([group], OBJECTIVE, now=0, lineage="test", seed=0, mask_truncated=True)
    assert [r.id for r in batch.rollouts] == [1, 3]
    assert batch.advantage_B.tolist() == [0.5, -0.5]
    assert [(use.rollout_id, use.advantage) for use in batch.uses] == [(1, 0.5), (2, None), (3, -0.5)]
    assert batch.metrics["response/truncated"] == pytest.approx(1 / 3)
    unmasked = collate([group], OBJECTIVE, now=0, lineage="test", seed=0)
    assert unmasked.advantage_B.tolist() == pytest.approx([1 - 10 / 3, 9 - 10 / 3, -10 / 3])


def test_a_group_that_differs_only_in_masked_responses_is_not_live():
    group = Group("p", (rollout(1, "stop", Reward(1.0)), rollout(2, "length", Reward(0.0))))
    assert count_live_groups([group]) == 1
    assert count_live_groups([group], mask_truncated=True) == 0
    assert collate([group], OBJECTIVE, now=0, lineage="test", seed=0, mask_truncated=True).rollouts == ()


def test_each_part_has_a_mean_where_there_are_several():
    both = rollout(1, "stop", Reward(1.0, "a"), Reward(0.5, "b"), Reward(2.0, "a", revision=1))
    one = rollout(2, "stop", Reward(4.0, "a"))
    metrics = collate([Group("p", (both, one))], OBJECTIVE, now=0, lineage="test", seed=0).metrics
    assert {k: v for k, v in metrics.items() if k.startswith("reward/")} == {
        "reward/mean": 3.25, "reward/zero_variance_fraction": 0.0, "reward/a": 3.0, "reward/b": 0.5
    }  # fmt: skip
    alone = collate([Group("p", (one, one))], OBJECTIVE, now=0, lineage="test", seed=0).metrics
    assert "reward/a" not in alone
