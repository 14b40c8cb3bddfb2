"""Loss and gradient do not depend on micro-batches, padding, packing or the order of rows, and are the formula's."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from solera.batch import Batch
from solera.config import LearnConfig, ObjectiveConfig
from solera.learner.learner import Learner
from solera.learner.reference import Reference
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.padded import padded_loss
from solera.objectives.table import TABLE, resolve
from solera.records import Completion, Group, Reward, Rollout, Sequence
from solera.streams import stream_seed, uniforms
from solera.training.collation import collate
from tests.conftest import random_prompt, random_rollout

GRPO = ObjectiveConfig("grpo", epsilon_low=0.5, epsilon_high=2.0)
TEMPERATURE = 0.8


def make_groups(seed: int = 0) -> list[Group]:
    """Seven groups of ragged responses; one has equal rewards, one a missing reward, one an empty response."""
    rng = np.random.default_rng(seed)
    groups, number = [], 0
    for key in range(7):
        prompt, rollouts = random_prompt(rng), []
        for member in range(4):
            reward = 1.0 if key == 3 else float(rng.integers(0, 3)) + 0.5 * (member == 0)
            rollouts.append(random_rollout(rng, key, prompt, reward, id=number))
            number += 1
        groups.append(Group(f"prompt/{key}", tuple(rollouts)))
    missing = dataclasses.replace(groups[1].rollouts[2], rewards=())
    nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "length")
    empty = dataclasses.replace(groups[2].rollouts[1], sequences=(Sequence.turns(((3, 4), nothing)),))
    groups[1] = Group("prompt/1", (*groups[1].rollouts[:2], missing, groups[1].rollouts[3]))
    groups[2] = Group("prompt/2", (groups[2].rollouts[0], empty, *groups[2].rollouts[2:]))
    return groups


def make_learner(
    model: LanguageModel,
    objective: ObjectiveConfig = GRPO,
    compute: torch.dtype = torch.float32,
    compiled: bool = False,
    **learn,
) -> Learner:
    config = LearnConfig(**{"lr": 0.0, "grad_clip": 1e9, "warmup": 0, **learn})
    composed = compose(resolve(objective))
    reference = Reference(model, objective.ref_period, objective.ref_ema) if composed.uses_reference else None
    return Learner(
        model,
        composed,
        config,
        lineage="test",
        temperature=TEMPERATURE,
        limit=8,
        steps=10,
        compute=compute,
        reference=reference,
        compiled=compiled,
    )


def gradient(model: LanguageModel, groups: list[Group], objective: ObjectiveConfig = GRPO, **learn) -> torch.Tensor:
    """The gradient that one update leaves behind, nothing clipped, nothing moved."""
    learner = make_learner(model, objective, **learn)
    learner.update(collate(groups, learner.objective, now=0, lineage="test", seed=0))
    return torch.cat([p.grad.flatten() for p in model.parameters().values()]).clone()


def formula_gradient(model: LanguageModel, batch: Batch) -> torch.Tensor:
    """GRPO's loss written out response by response with plain forward passes of the whole model."""
    model.module.zero_grad()
    loss = 0.0
    for rollout, advantage in zip(batch.rollouts, batch.advantage_B.tolist(), strict=True):
        (sequence,) = rollout.sequences
        ids = torch.tensor(sequence.token_ids_T.tolist())[None]
        logp = torch.log_softmax(model.module(input_ids=ids).logits[0] / TEMPERATURE, -1)
        response = 0.0
        for t in np.flatnonzero(sequence.mask_T):
            ratio = torch.exp(logp[t - 1, ids[0, t]] - float(sequence.behaviour_logp_T[t]))
            response -= torch.minimum(ratio * advantage, ratio.clamp(0.5, 3.0) * advantage)
        loss += response / sequence.length / len(batch.rollouts)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters().values()]).clone()


def assert_same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert torch.linalg.norm(a - b) <= tolerance * torch.linalg.norm(b), torch.linalg.norm(a - b) / torch.linalg.norm(b)


@pytest.mark.parametrize(
    "cut", [{}, {"micro_batch_tokens": 40}, {"micro_batch_tokens": 12}, {"logit_chunk": 3}], ids=str
)
def test_texts_laid_end_to_end_leave_the_same_gradient(tiny, cut):
    expected = gradient(tiny, make_groups())
    planned = tiny.copy(torch.float64).with_plans()
    planned.module.requires_grad_(True)
    assert_same(gradient(planned, make_groups(), **cut), expected)


def test_the_gradient_is_that_of_the_formula(tiny):
    groups = make_groups()
    batch = collate(groups, make_learner(tiny).objective, now=0, lineage="test", seed=0)
    assert len(batch.rollouts) == 4 * 7 - 4 - 2
    expected = formula_gradient(tiny, batch)
    assert torch.linalg.norm(expected) > 0.01
    assert_same(gradient(tiny, groups), expected)


@pytest.mark.parametrize(
    "cut",
    [
        {"pack_tokens": 0},
        {"pack_tokens": 0, "micro_batch_tokens": 1},
        {"pack_tokens": 0, "micro_batch_tokens": 40},
        {"pack_tokens": 12},
        {"pack_tokens": 1000, "micro_batch_tokens": 1},
        {"logit_chunk": 1},
        {"logit_chunk": 7, "pack_tokens": 0},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_does_not_depend_on_the_cut(tiny, cut, level):
    objective = ObjectiveConfig("off_policy_grpo", level=level, beta=0.1, entropy_bonus=0.05, epsilon=2.0)
    groups = make_groups()
    assert_same(gradient(tiny, groups, objective, **cut), gradient(tiny, groups, objective, pack_tokens=1000))


def test_the_gradient_does_not_depend_on_the_order_of_rows(tiny):
    groups = make_groups()
    rng = np.random.default_rng(5)
    shuffled = [Group(g.prompt_key, tuple(g.rollouts[i] for i in rng.permutation(4))) for g in groups]
    shuffled = [shuffled[i] for i in rng.permutation(7)]
    assert_same(gradient(tiny, shuffled), gradient(tiny, groups))


def test_a_response_of_several_sequences_is_one_response(tiny):
    """Cut at a turn, [a b | c d] as sequences [a | b] and [a b c | d] must weigh like one response of two tokens."""
    rng = np.random.default_rng(2)

    def turn(token: int) -> Completion:
        return Completion(np.array([token], np.int32), np.array([-1.0], np.float32), ((1, 0),), "stop")

    def split(rollout: Rollout) -> Rollout:
        sequences = (Sequence.turns(((2,), turn(5))), Sequence.turns(((2, 5, 7), turn(8))))
        return dataclasses.replace(rollout, sequences=sequences)

    def whole(rollout: Rollout) -> Rollout:
        return dataclasses.replace(rollout, sequences=(Sequence.turns(((2,), turn(5), (7,), turn(8))),))

    others = [random_rollout(rng, 0, (2,), reward, id=i) for i, reward in enumerate([0.0, 1.0, 0.0])]
    special = Rollout("prompt/0", (), (Reward(1.0),), lineage="test", id=9)
    objective = ObjectiveConfig("off_policy_grpo", level="sequence", epsilon=5.0)
    for cut in ({}, {"micro_batch_tokens": 1}, {"pack_tokens": 0}):
        several = gradient(tiny, [Group("prompt/0", (*others, split(special)))], objective, **cut)
        one = gradient(tiny, [Group("prompt/0", (*others, whole(special)))], objective, **cut)
        assert_same(several, one)


def written_out(model: LanguageModel, rollouts: tuple[Rollout, ...]) -> list[tuple[int, float, float]]:
    """Response, log π at the run's temperature and log α of every token, by one plain forward pass a sequence."""
    found = []
    for number, rollout in enumerate(rollouts):
        for sequence in rollout.sequences:
            ids = torch.tensor(sequence.token_ids_T.tolist())
            with torch.no_grad():
                logits = model.module(input_ids=ids[None]).logits[0]
            for t in np.flatnonzero(sequence.mask_T):
                logp = torch.log_softmax(logits[t - 1] / TEMPERATURE, -1)[ids[t]].item()
                found.append((number, logp, float(sequence.behaviour_logp_T[t])))
    return found


@pytest.mark.parametrize("flat", [False, True], ids=["padded", "end to end"])
@pytest.mark.parametrize(
    "cut",
    [{}, {"micro_batch_tokens": 40}, {"micro_batch_tokens": 12}, {"micro_batch_tokens": 1}, {"pack_tokens": 0},
     {"pack_tokens": 9, "micro_batch_tokens": 25}],
    ids=str,
)  # fmt: skip
def test_scored_tokens_come_in_the_order_of_the_rollouts_however_they_are_cut(tiny, cut, flat):
    """With ragged lengths, shared prompts, a repeated response, and a response of two sequences among them."""
    drawn = [rollout for group in make_groups() for rollout in group.rollouts if rollout.length]
    several = dataclasses.replace(drawn[4], sequences=(drawn[9].sequences[0], drawn[2].sequences[0]))
    rollouts = (*drawn[5:], several, drawn[3], *drawn[:5])
    model = tiny
    if flat:
        model = tiny.copy(torch.float64).with_plans()
    scored = make_learner(model, **cut).score(rollouts)
    number, logp, behaviour = zip(*written_out(tiny, rollouts), strict=True)
    assert scored.response_T.tolist() == list(number)
    assert scored.logp_T.tolist() == pytest.approx(logp, abs=1e-9)
    assert scored.behaviour_logp_T.tolist() == pytest.approx(behaviour, abs=1e-6)


def test_masked_groups_leave_the_denominator_too(tiny):
    groups = make_groups()
    without = [group for group in groups if group.prompt_key != "prompt/3"]
    assert_same(gradient(tiny, groups), gradient(tiny, without))
    unmasked = dataclasses.replace(GRPO, zero_variance_mask=False)
    kept = gradient(tiny, groups, unmasked)
    assert_same(kept * 26 / 22, gradient(tiny, groups))


def test_proximal_logp_is_taken_before_the_first_step(tiny):
    """With several passes and minibatches, the reported ratio is that of the weights before the batch."""
    groups = make_groups()
    plain = make_learner(tiny)
    batch = collate(groups, plain.objective, now=0, lineage="test", seed=0)
    before = plain.update(batch)
    learner = make_learner(tiny, lr=0.05, passes=2, minibatches=3)
    after = learner.update(batch)
    by_token = lambda update: sorted(zip(update.response_T.tolist(), update.log_ratio_T.tolist(), strict=True))  # noqa: E731
    for (response, expected), (same, value) in zip(by_token(before), by_token(after), strict=True):
        assert response == same
        assert math.isclose(expected, value, abs_tol=1e-6)


def right_padded(rollouts: list[Rollout]) -> torch.Tensor:
    """One sequence a row. What follows a token does not reach it, so the model needs no mask."""
    rows = [torch.tensor(rollout.sequences[0].token_ids_T.tolist()) for rollout in rollouts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def padded_gradient(model: LanguageModel, reference: LanguageModel, groups: list[Group], name: str) -> torch.Tensor:
    """The same objective by one plain forward pass of the padded responses, and the padded loss over all of them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ids_BT = right_padded(rollouts)
    mask_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    behaviour_BT = torch.zeros(ids_BT.shape, dtype=torch.float64)
    for b, rollout in enumerate(rollouts):
        (sequence,) = rollout.sequences
        mask_BT[b, : len(sequence.token_ids_T)] = torch.from_numpy(sequence.mask_T)
        behaviour_BT[b, : len(sequence.token_ids_T)] = torch.from_numpy(sequence.behaviour_logp_T).double()

    def logp_BT(policy: LanguageModel) -> torch.Tensor:
        logp_BTV = torch.log_softmax(policy.module(input_ids=ids_BT).logits[:, :-1] / TEMPERATURE, -1)
        return torch.nn.functional.pad(logp_BTV.gather(2, ids_BT[:, 1:, None])[..., 0], (1, 0))

    compared = torch.tensor([r.reward is not None and r.length > 0 for r in rollouts])
    uniform_B = torch.zeros(len(rollouts))
    uniform_B[compared] = torch.from_numpy(uniforms(np.array([stream_seed(0, 0)], np.uint64), int(compared.sum()))[0])
    model.module.zero_grad()
    loss, _ = padded_loss(
        compose(resolve(ObjectiveConfig(name))),
        logp_BT=logp_BT(model),
        mask_BT=mask_BT,
        reward_B=torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts], dtype=torch.float64),
        group_B=torch.tensor([p for p, group in enumerate(groups) for _ in group.rollouts]),
        behaviour_logp_BT=behaviour_BT,
        ref_logp_BT=logp_BT(reference).detach(),
        uniform_B=uniform_B,
        limit=8,
    )
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters().values()]).clone()


@pytest.mark.parametrize("name", TABLE)
def test_every_objective_is_the_same_in_one_piece_and_in_any_cut(tiny, name):
    groups = make_groups()
    expected = padded_gradient(tiny, tiny.copy(torch.float64), groups, name)
    assert torch.linalg.norm(expected) > 1e-4
    for cut in ({"pack_tokens": 1000}, {"pack_tokens": 0, "micro_batch_tokens": 20}, {"micro_batch_tokens": 40}):
        assert_same(gradient(tiny, groups, ObjectiveConfig(name), **cut), expected, tolerance=5e-6)
