"""Who moved the policy, against sums made by hand; however the batch is cut."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest

from solera.config import ObjectiveConfig
from solera.records import Group, Rollout, Sequence, Span
from solera.training.collation import collate
from tests.learner.test_invariance import make_groups, make_learner

ORIGINS = ("self", "model:a", "human", "self")


def mixed_groups() -> list[Group]:
    """Groups of several origins; the members of `self` were written at versions 0 and 5."""
    groups = []
    for group in make_groups():
        members = [dataclasses.replace(r, origin=o) for r, o in zip(group.rollouts, ORIGINS, strict=True)]
        members[1] = dataclasses.replace(members[1], lineage=None)
        members[2] = dataclasses.replace(members[2], lineage="another")
        groups.append(Group(group.prompt_key, (*members[:3], at_version_5(members[3]))))
    return groups


def at_version_5(rollout: Rollout) -> Rollout:
    (s,) = rollout.sequences
    spans = tuple(Span(span.start, span.stop, 5) for span in s.spans)
    return dataclasses.replace(rollout, sequences=(Sequence(s.token_ids_T, spans, s.span_logp),))


def divided(values: dict[str, float]) -> dict[str, float]:
    return {name: pytest.approx(value / sum(values.values()), rel=1e-5) for name, value in values.items()}


def family(metrics: dict[str, float], name: str) -> dict[str, float]:
    return {key.partition("/")[2]: value for key, value in metrics.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("cut", [{}, {"micro_batch_tokens": 24}, {"minibatches": 3}, {"passes": 2}])
def test_tokens_and_gradient_divide_as_the_formula_says(tiny, cut):
    """REINFORCE, sequence sums: each token's derivative is −A / B, so that a response weighs |A|·length."""
    learner = make_learner(tiny, ObjectiveConfig("reinforce", aggregation="sequence_sum"), lr=0.0, **cut)
    learner.version = 7
    groups = mixed_groups()
    metrics = learner.update(collate(groups, learner.objective, now=7, lineage="test", seed=0)).metrics
    tokens, weight, ages = (defaultdict[str, float](float) for _ in range(3))
    for group in groups:
        compared = [r for r in group.rollouts if r.reward is not None and r.length]
        mean = sum(r.reward for r in compared) / len(compared)
        if len({r.reward for r in compared}) > 1:
            for r in compared:
                tokens[r.origin] += r.length
                weight[r.origin] += r.length * abs(r.reward - mean)
                ages[{"self": f"{'2-3' if r.version == 5 else '4-7'}"}.get(r.origin, "none")] += r.length
    if cut != {"minibatches": 3}:  # a sum over fewer responses weighs them more
        assert family(metrics, "origin_weight") == divided(weight)
    assert family(metrics, "origin_tokens") == divided(tokens)
    assert family(metrics, "age_tokens") == divided(ages)
    assert family(metrics, "origin_clipped") == {}


def test_clipped_tokens_are_of_who_wrote_them(tiny):
    """Ratios far above 1 silence what is better than its group, ratios below 1 what is worse."""
    learner = make_learner(tiny, ObjectiveConfig("grpo", epsilon_low=0.01, epsilon_high=0.01), lr=0.0)
    learner.version = 7
    groups, clipped = mixed_groups(), defaultdict[str, float](float)
    for group in groups:
        compared = [r for r in group.rollouts if r.reward is not None and r.length]
        mean = sum(r.reward for r in compared) / len(compared)
        for r in compared:
            (s,) = r.sequences
            above = r.origin == "model:a"
            object.__setattr__(s, "span_logp", np.full_like(s.span_logp, -60.0 if above else 0.0))
            if (r.reward > mean) if above else (r.reward < mean):
                clipped[r.origin] += r.length
    metrics = learner.update(collate(groups, learner.objective, now=7, lineage="test", seed=0)).metrics
    assert family(metrics, "origin_clipped") == divided(clipped)
    assert sum(family(metrics, "age_clipped").values()) == pytest.approx(1.0)


def test_a_response_of_two_versions_counts_for_both_ages_token_by_token(tiny):
    """REINFORCE, sequence sums: each token's derivative is −A / B. The first token is two batches older."""
    learner = make_learner(
        tiny, ObjectiveConfig("reinforce", aggregation="sequence_sum"), lr=0.0, micro_batch_tokens=24
    )
    learner.version = 7
    groups = [Group(g.prompt_key, tuple(map(of_versions_5_and_7, g.rollouts))) for g in make_groups()]
    metrics = learner.update(collate(groups, learner.objective, now=7, lineage="test", seed=0)).metrics
    tokens, weight = {"0": 0.0, "2-3": 0.0}, {"0": 0.0, "2-3": 0.0}
    for group in groups:
        compared = [r for r in group.rollouts if r.reward is not None and r.length]
        mean = sum(r.reward for r in compared) / len(compared)
        for r in compared if len({r.reward for r in compared}) > 1 else ():
            for age, count in (("2-3", 1), ("0", r.length - 1)):
                tokens[age] += count
                weight[age] += count * abs(r.reward - mean)
    assert family(metrics, "age_tokens") == divided(tokens)
    assert family(metrics, "age_weight") == divided(weight)


def of_versions_5_and_7(rollout: Rollout) -> Rollout:
    (s,) = rollout.sequences
    if not s.spans:
        return rollout
    ((start, stop, _),) = s.spans
    spans = (Span(start, start + 1, 5), Span(start + 1, stop, 7)) if stop > start + 1 else (Span(start, stop, 5),)
    return dataclasses.replace(rollout, sequences=(Sequence(s.token_ids_T, spans, s.span_logp),))
