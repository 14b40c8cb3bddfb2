"""`objective.credit = "turn"` against the formula written out with plain loops, in value and gradient."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from solera.config import LearnConfig, ObjectiveConfig
from solera.errors import SoleraError
from solera.learner.learner import Learner
from solera.objectives.objective import compose
from solera.objectives.table import TABLE, resolve
from solera.records import Completion, Group, Prompt, Reward, Rollout, Sampling
from solera.store.ledger import Ledger
from solera.training.collation import collate
from solera.training.credit import returns_to_go, turn_of_tokens
from tests.conftest import VOCABULARY

PROMPT = Prompt("p", (2, 3, 4))


def completion(rng, length: int, versions: int = 1) -> Completion:
    ids = rng.integers(2, VOCABULARY, length).astype(np.int32)
    logp = -rng.exponential(1.0, length).astype(np.float32)
    counts = ((length, 0),) if versions == 1 else ((1, 0), (length - 1, 1))
    return Completion(ids, logp, counts, "stop", "run", Sampling(1.0, 8))


def rollout(rng, turns: list[float], split: int | None, id_: int, last: float = 0.0) -> tuple[Rollout, list[int]]:
    """An episode whose turn k has the reward `turns[k]`; from turn `split` on, it is in a second sequence. Returns it
    with the lengths of its turns."""
    sequences, rewards, lengths = [[PROMPT.token_ids]], [], []
    for number, value in enumerate(turns):
        if number == split:
            sequences.append([(5, 6)])
        elif number:
            sequences[-1].append((7,))
        length = int(rng.integers(2, 5))
        written = completion(rng, length, versions=1 + number % 2)
        before = sum(len(part.token_ids_T) for part in sequences[-1] if isinstance(part, Completion))
        place = int(rng.integers(before, before + length))  # any token of the turn
        sequences[-1].append(written)
        lengths.append(length)
        rewards.append(Reward(value, f"turn {number}", position=place, sequence=len(sequences) - 1))
    rewards.append(Reward(last, "whole"))
    made = Rollout.of_sequences(PROMPT, *map(tuple, sequences), rewards=tuple(rewards))
    return made.numbered(id_), lengths


def groups_of(seed: int) -> tuple[list[Group], dict[int, tuple[list[float], list[int]]]]:
    """Groups with episodes of one to four turns; of every rollout, its returns-to-go by hand and its turns' lengths."""
    rng, groups, known, id_ = np.random.default_rng(seed), [], {}, 0
    for p in range(4):
        members = []
        for _ in range(5):
            turns = [float(rng.integers(0, 3)) for _ in range(int(rng.integers(1, 5)))] if p else [1.0, 1.0]
            split = int(rng.integers(1, 4)) if rng.random() < 0.5 else None
            last = float(rng.integers(0, 2)) if p else 0.0
            id_ += 1
            made, lengths = rollout(rng, turns, split, id_, last)
            members.append(made)
            known[id_] = [sum(turns[k:]) + last for k in range(len(turns))], lengths
        groups.append(Group("p", tuple(members)))
    return groups, known


def by_hand(groups, known, name: str) -> dict[int, list[float]]:
    """The advantage of every token, rollout by rollout."""
    found = {}
    for group in groups:
        for rollout_ in group.rollouts:
            returns, lengths = known[rollout_.id]
            values = []
            for k, (return_, length) in enumerate(zip(returns, lengths, strict=True)):
                reached = [known[other.id][0][k] for other in group.rollouts if len(known[other.id][0]) > k]
                mean = sum(reached) / len(reached)
                variance = sum((r - mean) ** 2 for r in reached) / len(reached)
                scale = {"mean": 1.0, "whiten": 1 / math.sqrt(variance + 1e-8)}.get(name)
                scale = len(reached) / max(1, len(reached) - 1) if name == "leave_one_out" else scale
                values += [(return_ - mean) * scale if len(reached) > 1 else 0.0] * length
            found[rollout_.id] = values
    return found


def objective_of(**fields):
    return compose(resolve(ObjectiveConfig("reinforce", credit="turn", **fields)))


@pytest.mark.parametrize("name", ["mean", "whiten", "leave_one_out"])
def test_advantages_are_those_of_the_formula(name):
    groups, known = groups_of(0)
    batch = collate(groups, objective_of(advantage=name), now=1, lineage="run", seed=0)
    wanted = by_hand(groups, known, name)
    assert {r.id for r in batch.rollouts} == {r.id for group in groups[1:] for r in group.rollouts}  # the first is flat
    for made, value_T in zip(batch.rollouts, batch.turn_advantages, strict=True):
        np.testing.assert_allclose(value_T, wanted[made.id], atol=1e-9)
        assert returns_to_go(made).tolist() == known[made.id][0]
        assert np.bincount(turn_of_tokens(made)).tolist() == known[made.id][1]


@pytest.mark.parametrize("budget", [10_000, 12])
def test_the_gradient_is_that_of_the_formula(tiny, budget):
    groups, known = groups_of(1)
    objective = objective_of(advantage="mean", aggregation="token_mean")
    learner = Learner(
        tiny, objective, LearnConfig(lr=1e-3, grad_clip=1e9, micro_batch_tokens=budget), lineage="run", temperature=1.0,
        limit=16, steps=9, compute=torch.float32, reference=None,
    )  # fmt: skip
    batch = collate(groups, objective, now=1, lineage="run", seed=0)
    wanted, tokens = by_hand(groups, known, "mean"), sum(r.length for r in batch.rollouts)
    loss = torch.zeros((), dtype=torch.float64)
    for made in batch.rollouts:
        values = iter(wanted[made.id])
        for sequence in made.sequences:
            ids = torch.tensor(sequence.token_ids_T.astype(np.int64))
            logp = torch.log_softmax(tiny.module(input_ids=ids[None]).logits[0], -1)
            for place in np.flatnonzero(sequence.mask_T):
                loss = loss - next(values) * logp[place - 1, ids[place]] / tokens
    loss.backward()
    expected = {key: p.grad.clone() for key, p in tiny.parameters().items()}
    assert (len(learner._cut(batch.rollouts)) > 1) == (budget < 100)
    found = learner.update(batch)
    assert found.metrics["learn/loss"] == pytest.approx(float(loss.detach()), abs=2e-7)
    for key, p in tiny.parameters().items():
        # Gradients are up to 0.1. The weights of responses, and so the difference, are of float32.
        np.testing.assert_allclose(p.grad.numpy(), expected[key].numpy(), rtol=0, atol=2e-7)


def test_with_one_turn_and_one_reward_both_kinds_of_credit_are_the_same():
    rng = np.random.default_rng(2)
    members = tuple(
        Rollout.of(PROMPT, completion(rng, 3), rewards=(Reward(float(n % 3)),)).numbered(n + 1) for n in range(6)
    )
    by_turn = collate([Group("p", members)], objective_of(), now=1, lineage="run", seed=0)
    whole = dataclasses.replace(objective_of(), by_turn=False)
    plain = collate([Group("p", members)], whole, now=1, lineage="run", seed=0)
    assert plain.turn_advantages is None
    for value_T, advantage in zip(by_turn.turn_advantages, plain.advantage_B, strict=True):
        np.testing.assert_allclose(value_T, advantage)


def test_equal_totals_are_not_flat_if_turns_differ():
    """1 then 0 against 0 then 1: the totals are equal, but the second turns are not."""
    rng = np.random.default_rng(3)
    members = tuple(rollout(rng, turns, None, n)[0] for n, turns in enumerate(([1.0, 0.0], [0.0, 1.0]), 1))
    batch = collate([Group("p", members)], objective_of(advantage="mean"), now=1, lineage="run", seed=0)
    assert [sorted(set(value_T)) for value_T in batch.turn_advantages] == [[-0.5, 0.0], [0.0, 0.5]]


def test_a_reward_keeps_its_place_in_the_store(tmp_path):
    made, _ = rollout(np.random.default_rng(4), [1.0, 2.0, 3.0], 1, 1)
    store = Ledger(tmp_path / "store.db")
    (id_,) = store.add([made])
    store.revise([(id_, Reward(9.0, "turn 2", "anna", position=0, sequence=1))])
    (back,) = store.fetch([id_])
    assert back.parts["turn 2"] == 9.0
    places = {(r.part, r.revision): (r.position, r.sequence) for r in back.rewards}
    assert places["turn 2", 1] == (0, 1) and places["turn 0", 0][1] == 0 and places["whole", 0] == (None, None)
    store.close()


def test_what_cannot_have_it_is_refused():
    for fields, complaint in (
        ({"name": "sft", "credit": "turn"}, "objective.credit is not used by sft"),
        ({"name": "grpo", "credit": "turn", "refill": True}, "objective.refill counts groups by their total rewards"),
        ({"name": "rec_oneside_nois", "credit": "turns"}, "objective.credit"),
    ):
        with pytest.raises(SoleraError, match=complaint):
            resolve(ObjectiveConfig(**fields))
    tempered = next(name for name, row in TABLE.items() if row.constants.get("weight") == "exp_advantage")
    with pytest.raises(SoleraError, match="weights whole responses by their advantage"):
        resolve(ObjectiveConfig(tempered, credit="turn"))
    with pytest.raises(SoleraError, match="position is -1; it must be a whole number from 0"):
        Reward(1.0, position=-1)
