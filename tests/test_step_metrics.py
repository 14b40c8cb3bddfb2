"""How far a step's data is from the policy, by hand: two ages, two origins, one response only watched."""

import math

import numpy as np
import pytest

from solera.batch import Update
from solera.config import ObjectiveConfig
from solera.diagnosis.mismatch import Mismatch
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.records import Completion, Group, Prompt, Reward, Rollout
from solera.training.collation import collate
from solera.training.step_metrics import off_policy_metrics

NOW = 6


def rollout(key: str, length: int, reward: float | None, version: int = NOW, origin: str = "self", finish="stop"):
    completion = Completion(
        np.arange(2, 2 + length, dtype=np.int32), np.full(length, -1.0, np.float32), ((length, version),), finish,
        lineage="run",
    )  # fmt: skip
    rewards = () if reward is None else (Reward(reward),)
    return Rollout.of(Prompt(key, (1, 2)), completion, rewards=rewards, origin=origin)


def batch_of(*groups: tuple[Rollout, ...], name: str = "grpo", **settings):
    objective = compose(resolve(ObjectiveConfig(name, **settings)))
    several = [Group(group[0].prompt_key, group) for group in groups]
    return collate(several, objective, now=NOW, lineage="run", seed=0, mask_truncated=True)


LIVE = (rollout("a", 3, 1.0), rollout("a", 1, 0.0, version=1, origin="file"))
FLAT = (rollout("b", 5, 0.0), rollout("b", 2, 0.0))


def figures(w: list[float]) -> dict[str, float]:
    """Of responses with these importance weights, each on its first token: every token more has ratio 1."""
    return {
        "tv_sequence": np.mean([max(0, 1 - x) for x in w]), "kl": np.mean([x - 1 - math.log(x) for x in w]),
        "chi2": np.mean([(x - 1) ** 2 for x in w]), "ess": sum(w) ** 2 / (len(w) * sum(x * x for x in w)),
    }  # fmt: skip


def test_figures_by_age_by_origin_and_what_counted():
    batch = batch_of(LIVE, FLAT)
    assert [batch.rollouts, batch.watched] == [LIVE, FLAT]
    w = [1.5, 0.5, 1.25, 1.0]
    log_ratio_T = np.array([math.log(1.5), 0, 0, math.log(0.5), math.log(1.25), 0, 0, 0, 0, 0, 0])
    response_T = np.array([0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3])
    update = Update({}, log_ratio_T, response_T)
    found = off_policy_metrics(batch, update, Mismatch(1.0, print), NOW, "run")
    for label, weights in {
        "": w, "age_0/": [1.5, 1.25, 1.0], "age_4-7/": [0.5], "origin_self/": [1.5, 1.25, 1.0], "origin_file/": [0.5],
    }.items():  # fmt: skip
        for name, value in figures(weights).items():
            assert found[f"divergence/{label}{name}"] == pytest.approx(value, abs=1e-6)
    assert found["divergence/age_4-7/tv_token"] == pytest.approx(0.5)
    assert found["divergence/tv_token"] == pytest.approx(0.5 / 11)
    # Only the two that were trained on: (1.5 + .5)² / (2·(2.25 + .25)) = .8 of their 4 tokens.
    assert found["tokens/effective"] == pytest.approx(3.2)
    assert found["waste/stale"] == pytest.approx(0.8)
    assert found["mismatch/logp"] == pytest.approx((math.log(1.5) + math.log(1.25)) / 10)


def test_a_batch_of_one_age_and_origin_says_it_once():
    batch = batch_of((LIVE[0], rollout("a", 1, 0.0)))
    update = Update({}, np.zeros(4), np.array([0, 0, 0, 1]))
    found = off_policy_metrics(batch, update, Mismatch(1.0, print), NOW, "run")
    assert not any("age_" in name or "origin_" in name for name in found)
    assert (found["tokens/effective"], found["waste/stale"]) == (4, 0)


def test_a_response_whose_author_is_unknown_is_left_out_of_the_figures():
    """The update has no tokens of response 1, which was trained on: the others keep their ages, origins and weights."""
    batch = batch_of(LIVE, FLAT)
    log_ratio_T = np.array([math.log(1.5), 0, 0, math.log(1.25), 0, 0, 0, 0, 0, 0])
    update = Update({}, log_ratio_T, np.array([0, 0, 0, 2, 2, 2, 2, 2, 3, 3]))
    found = off_policy_metrics(batch, update, Mismatch(1.0, print), NOW, "run")
    for name, value in figures([1.5, 1.25, 1.0]).items():
        assert found[f"divergence/{name}"] == pytest.approx(value)
    assert not any("age_" in name or "origin_" in name for name in found)
    assert (found["tokens/effective"], found["waste/stale"]) == (4, 0)  # the one response left has an ess of 1


def test_an_update_that_scored_nothing_has_no_figures():
    update = Update({}, np.zeros(0, np.float32), np.zeros(0, np.int64))
    assert off_policy_metrics(batch_of(LIVE), update, Mismatch(1.0, print), NOW, "run") == {}


def wasted(batch) -> dict[str, float]:
    return {name.split("/")[1]: value for name, value in batch.metrics.items() if name.startswith("waste/")}


def test_every_token_drawn_is_trained_on_or_has_a_reason():
    """Lengths are powers of two: each sum says which responses are in it."""
    truncated, ungraded = rollout("a", 16, 1.0, finish="length"), rollout("a", 32, None)
    members = (rollout("a", 1, 1.0), rollout("a", 2, 0.0), truncated, ungraded)
    batch = batch_of(members, (rollout("b", 4, 1.0), rollout("b", 8, 1.0)))
    assert wasted(batch) == {"zero_variance": 12, "truncated": 16, "ungraded": 32}
    assert (batch.metrics["tokens/trained"], batch.metrics["tokens/graded"]) == (3, 31)


def test_dropped_and_left_out_have_their_own_reasons():
    members = (rollout("a", 1, 1.0), rollout("a", 2, -1.0), rollout("a", 4, -2.0))
    assert wasted(batch_of(members, name="red_drop", drop="worst")) == {"zero_variance": 0, "dropped": 4}
    assert wasted(batch_of(members, name="sft")) == {"zero_variance": 0, "left_out": 6}


def by_versions(key: str, reward: float, *versions: tuple[int, int]) -> Rollout:
    length = sum(count for count, _ in versions)
    completion = Completion(
        np.arange(2, 2 + length, dtype=np.int32), np.full(length, -1.0, np.float32), versions, "stop", lineage="run"
    )
    return Rollout.of(Prompt(key, (1, 2)), completion, rewards=(Reward(reward),))


def test_a_response_of_several_versions_is_divided_by_token():
    """Response 0: two tokens of age 5, then one of age 0. Response 1: age 0. The tokens come in another order."""
    batch = batch_of((by_versions("a", 1.0, (2, 1), (1, NOW)), rollout("a", 2, 0.0)))
    assert batch.metrics["age/mean"] == pytest.approx((10 / 3 + 0) / 2)
    assert (batch.metrics["age/max"], batch.metrics["age/mixed"]) == (5, 0.5)
    update = Update({}, np.log([2.0, 0.5, 0.5, 1.0, 2.0]), np.array([1, 0, 0, 1, 0]))
    found = off_policy_metrics(batch, update, Mismatch(1.0, print), NOW, "run")
    for label, weights in {"": [0.5, 2.0], "age_4-7/": [0.25], "age_0/": [2.0, 2.0]}.items():
        for name in ("tv_sequence", "chi2", "ess"):
            assert found[f"divergence/{label}{name}"] == pytest.approx(figures(weights)[name])
    assert found["divergence/age_4-7/kl"] == pytest.approx(2 * (0.5 - 1 + math.log(2)))
    assert found["divergence/age_4-7/tv_token"] == 0.5
    assert found["mismatch/logp"] == pytest.approx(2 * math.log(2) / 3)  # of the three tokens of age 0
    assert found["divergence/by_cause/engine"] == pytest.approx(2 * (1 - math.log(2)) / 3)
    assert batch.uses == []  # these rollouts have no ids


def test_the_age_of_a_use_is_that_of_the_oldest_token():
    mixed = by_versions("a", 1.0, (1, 4), (5, 2), (1, NOW)).numbered(3)
    (use, _) = batch_of((mixed, rollout("a", 1, 0.0).numbered(4))).uses
    assert use.age == 4
