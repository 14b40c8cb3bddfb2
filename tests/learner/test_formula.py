"""Whole updates against the objective written out anew: forward passes of the plain model, scalar formulas, AdamW."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from solera.config import LearnConfig, ObjectiveConfig
from solera.learner.learner import Learner
from solera.learner.reference import Reference
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.records import Group, Rollout
from solera.training.collation import collate
from tests.learner.test_invariance import make_groups, right_padded

TEMPERATURE = 0.8


def scores(model: LanguageModel, rollouts: list[Rollout]) -> dict[int, tuple[Tensor, Tensor]]:
    """Log-probability and entropy at each token the policy answers for, by the rollout's id."""
    ids_BT, found = right_padded(rollouts), {}
    logp_BTV = torch.log_softmax(model.module(input_ids=ids_BT).logits / TEMPERATURE, -1)
    for rollout, ids, logp in zip(rollouts, ids_BT, logp_BTV, strict=True):
        places = torch.tensor(np.flatnonzero(rollout.sequences[0].mask_T))
        entropy = -(logp[places - 1].exp() * logp[places - 1]).sum(-1)
        found[rollout.id] = logp[places - 1, ids[places]], entropy
    return found


def advantages(group: Group, name: str) -> dict[int, float]:
    graded = [r for r in group.rollouts if r.reward is not None and r.length]
    rewards = [r.reward for r in graded]
    if len(set(rewards)) < 2:
        return {}
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / len(rewards)
    scale = math.sqrt(variance + 1e-8) if name == "whiten" else 1.0
    return {r.id: (r.reward - mean) / scale for r in graded}


def response_loss(c: ObjectiveConfig, logp, entropy, behaviour, proximal, ref, advantage: float) -> Tensor:
    """Loss of each token of one response, off_policy_grpo with KL and entropy bonus."""
    log_ratio, log_centre = logp - behaviour, proximal - behaviour
    if c.level == "sequence":
        log_ratio, log_centre = log_ratio.sum().expand_as(logp), log_centre.sum().expand_as(logp)
    ratio = log_ratio.exp()
    centre = log_centre.exp() if c.centre == "proximal" else torch.ones_like(ratio)
    clipped = torch.maximum(torch.minimum(ratio, centre + c.epsilon), (centre - c.epsilon).clamp_min(0))
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    d = ref - logp
    kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[c.kl]
    if c.kl_weight == "importance":
        weight = (logp - behaviour).exp()
        kl = (weight.detach() if c.kl == "k2" else weight) * kl
    return policy + c.beta * kl - c.entropy_bonus * entropy


def by_formula(
    model: LanguageModel, ref: LanguageModel, groups: list[Group], c: ObjectiveConfig, learn: LearnConfig
) -> None:
    """Train `model` as the papers write it, cut into as many minibatches of whole groups."""
    live = [(g, a) for g in groups if (a := advantages(g, c.advantage))]
    edges = [round(m * len(live) / learn.minibatches) for m in range(learn.minibatches + 1)]
    optimiser = torch.optim.AdamW(
        model.module.parameters(), lr=learn.lr / learn.warmup, betas=learn.betas, weight_decay=learn.weight_decay
    )
    learned = [r for g, a in live for r in g.rollouts if r.id in a]
    with torch.no_grad():
        proximal, reference = scores(model, learned), scores(ref, learned)
    for _ in range(learn.passes):
        for start, stop in itertools.pairwise(edges):
            members = [(r, a[r.id]) for g, a in live[start:stop] for r in g.rollouts if r.id in a]
            tokens = sum(r.length for r, _ in members)
            loss, scored = torch.zeros((), dtype=torch.float64), scores(model, [r for r, _ in members])
            for r, advantage in members:
                logp, entropy = scored[r.id]
                behaviour = torch.tensor(r.sequences[0].span_logp.astype(float))
                part = response_loss(c, logp, entropy, behaviour, proximal[r.id][0], reference[r.id][0], advantage)
                loss = loss + (part.sum() / tokens if c.aggregation == "token_mean" else part.mean() / len(members))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def flat(model: LanguageModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters().values()])


@pytest.mark.parametrize("trial", range(24))
def test_an_update_is_what_the_formula_does(tiny, trial):
    rng = np.random.default_rng(trial)

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    kl = pick("k1", "k2", "k3")
    objective = resolve(
        ObjectiveConfig(
            "off_policy_grpo", epsilon=pick(0.05, 0.2, 2.0), centre=pick("one", "proximal"),
            level=pick("token", "sequence"), beta=0.3, kl=kl, entropy_bonus=0.1,
            kl_weight="importance" if kl == "k1" else pick("importance", "none"),
            aggregation=pick("token_mean", "sequence_mean"), advantage=pick("mean", "whiten"),
        )
    )  # fmt: skip
    learn = LearnConfig(
        lr=2e-2, warmup=2, grad_clip=1e9, weight_decay=0.1, passes=pick(1, 2, 3), minibatches=pick(1, 2, 3),
        micro_batch_tokens=pick(1, 60, 9999), pack_tokens=pick(0, 30, 128),
    )  # fmt: skip
    start, groups = flat(tiny), make_groups(trial)
    expected, ref = (LanguageModel(tiny.copy(torch.float64).module.requires_grad_(True)) for _ in range(2))
    with torch.no_grad():
        for parameter in ref.parameters().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(trial)))
    by_formula(expected, ref, groups, objective, learn)
    composed = compose(objective)
    learner = Learner(
        tiny, composed, learn, lineage="test", temperature=TEMPERATURE, limit=8, steps=10, compute=torch.float32,
        reference=Reference(ref, None, None),
    )  # fmt: skip
    learner.update(collate(groups, composed, now=0, lineage="test", seed=0))
    moved = torch.linalg.norm(flat(expected) - start)
    assert moved > 0.1
    assert torch.linalg.norm(flat(tiny) - flat(expected)) < 1e-5 * moved
