"""Check the improvement estimate on policies so small that the true improvement can be summed exactly.

python benchmarks/improvement_statistics.py [--triples 10000] [--updates 260] [--seed 0] [--processes 1]

The first part draws random triples of policies (π after the update, π_k before it, α the behaviour policy). On each,
the identity must be exact and no bound violated. The second part makes updates: it fits a policy whose parameters all
prompts share to a batch of stale data, and judges the update on probes as a run does. The truth is the change of the
expected reward over all prompts. Axes: `_X` all prompts, `_P` some prompts, `_A` answers, `_F` features.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from solera.diagnosis.improvement import Improvement, estimate_improvement, identity, lower_bound
from solera.diagnosis.verdict import CERTIFIED, HARMFUL

PROMPTS, ANSWERS, FEATURES = 500, 8, 25
BATCH, GROUP = 24, 8
UPDATES_A_WORLD = 20
PROBES = 32
"""Number of probes on which each update is judged."""


class Worst(NamedTuple):
    """Over many triples: largest error of the identity, and largest excess of a bound over the improvement."""

    identity: float
    tight: float
    theorem1: float


def triples(count: int, rng: np.random.Generator) -> Worst:
    """Random policies over 2 to 12 answers, close together or far apart; rewards in [0, 1], half of them binary."""
    worst = Worst(0, -np.inf, -np.inf)
    for number in range(count):
        answers = int(rng.integers(2, 13))
        base = 10 ** rng.uniform(-1, 0.5) * rng.normal(size=answers)
        far = 10 ** rng.uniform(-2.5, 0.5)
        pi, pi_k, alpha = (softmax(base + far * rng.normal(size=answers)) for _ in range(3))
        reward = rng.random(answers)
        if number % 2:
            reward = (reward < rng.random()).astype(float)
        given = [torch.from_numpy(value) for value in (alpha, pi / alpha, pi_k / alpha, reward)]
        truth = pi @ reward - pi_k @ reward
        found = [lower_bound(*given, factor=factor).item() - truth for factor in (1, 2)]
        worst = Worst(*np.maximum(worst, (abs(identity(*given).item() - truth), *found)))
    return worst


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


class World:
    """Prompts with features, and right answers that a linear policy can learn in part."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.features_XF = rng.normal(size=(PROMPTS, FEATURES)) / FEATURES**0.5
        self.teacher_FA = rng.normal(size=(FEATURES, ANSWERS))
        liking_XA = self.features_XF @ self.teacher_FA + 0.5 * rng.normal(size=(PROMPTS, ANSWERS))
        self.reward_XA = (liking_XA > np.quantile(liking_XA, 0.75, axis=1, keepdims=True)).astype(float)

    def policy(self, weights_FA: np.ndarray) -> np.ndarray:
        return softmax(self.features_XF @ weights_FA)

    def value(self, policy_XA: np.ndarray) -> float:
        return float((policy_XA * self.reward_XA).sum(1).mean())

    def write(self, policy_XA: np.ndarray, prompts: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw distinct prompts and a group of answers to each. `[P], [P, G]`"""
        chosen_P = self.rng.choice(PROMPTS, prompts, replace=False)
        place_PG = self.rng.random((prompts, group, 1))
        return chosen_P, (policy_XA[chosen_P].cumsum(1)[:, None] < place_PG).sum(-1).clip(max=ANSWERS - 1)

    def fit(
        self, weights_FA: np.ndarray, alpha_XA: np.ndarray, rate: float, corrected: bool, batch: int = BATCH
    ) -> np.ndarray:
        """Step on a batch of α's answers; the baseline is the group mean. `corrected` uses ratios capped at 2."""
        chosen_P, answer_PG = self.write(alpha_XA, batch, GROUP)
        reward_PG = self.reward_XA[chosen_P[:, None], answer_PG]
        policy_PA = self.policy(weights_FA)[chosen_P]
        ratio_PG = np.take_along_axis(policy_PA / alpha_XA[chosen_P], answer_PG, 1)
        weight_PG = (reward_PG - reward_PG.mean(1, keepdims=True)) * (np.minimum(ratio_PG, 2) if corrected else 1)
        pull_PA = (weight_PG[..., None] * (np.eye(ANSWERS)[answer_PG] - policy_PA[:, None])).mean(1)
        return weights_FA + rate * self.features_XF[chosen_P].T @ pull_PA / batch

    def update(self) -> tuple[np.ndarray, ...]:
        """Return π, π_k and α: α is partly trained, π_k learned from up to 20 batches of α, and π from one more, which
        may be large and then helps much."""
        rng, corrected = self.rng, bool(self.rng.integers(2))
        weights_FA = rng.uniform(0, 1.5) * self.teacher_FA + 0.7 * rng.normal(size=(FEATURES, ANSWERS))
        alpha_XA, rate = self.policy(weights_FA), 10 ** rng.uniform(1, 3.5)
        for _ in range(rng.integers(0, 21)):
            weights_FA = self.fit(weights_FA, alpha_XA, rate, corrected)
        after_FA = self.fit(weights_FA, alpha_XA, rate, corrected, BATCH * int(rng.choice([1, 10])))
        return self.policy(after_FA), self.policy(weights_FA), alpha_XA

    def judge(
        self, after_XA: np.ndarray, before_XA: np.ndarray, alpha_XA: np.ndarray, probe: int, group: int
    ) -> Improvement:
        """What a run would say of the update, on a probe that α writes."""
        chosen_P, answer_PG = self.write(alpha_XA, probe, group)
        given = [
            torch.from_numpy(np.take_along_axis(value_XA[chosen_P], answer_PG, 1).ravel())
            for value_XA in (after_XA / alpha_XA, before_XA / alpha_XA, self.reward_XA)
        ]
        found = estimate_improvement(*given, torch.arange(probe).repeat_interleave(group))
        assert found is not None
        return found


class Trial(NamedTuple):
    """One update judged on several probes: the truth, the spread of the estimate, and the shares of each verdict."""

    truth: float
    error: float
    covered: float
    certified: float
    harmful: float


def trial(world: World, probe: int, group: int) -> Trial:
    after_XA, before_XA, alpha_XA = world.update()
    truth = world.value(after_XA) - world.value(before_XA)
    found = [world.judge(after_XA, before_XA, alpha_XA, probe, group) for _ in range(PROBES)]
    said = [one.metrics() for one in found]
    return Trial(
        truth,
        float(np.std([one.gain for one in found], ddof=1)),
        float(np.mean([m["improvement/low"] <= truth <= m["improvement/high"] for m in said])),
        float(np.mean([m["improvement/state"] == CERTIFIED for m in said])),
        float(np.mean([m["improvement/state"] == HARMFUL for m in said])),
    )


def world_trials(number: int, seed: int, probe: int, group: int) -> list[Trial]:
    world = World(np.random.default_rng([seed, number]))
    return [trial(world, probe, group) for _ in range(UPDATES_A_WORLD)]


def shares(updates: int, probe: int, group: int, seed: int, each=map) -> dict[str, float]:
    """Summarise many updates: how often the interval covers the truth (and the standard error of this over worlds), how
    often a verdict is right, and how often an improvement larger than three standard errors is certified."""
    worlds = range(-(-updates // UPDATES_A_WORLD))
    found_WUQ = np.array(list(each(partial(world_trials, seed=seed, probe=probe, group=group), worlds)))
    truth, error, covered, certified, harmful = found_WUQ.reshape(-1, len(Trial._fields)).T
    covered_W = found_WUQ[..., Trial._fields.index("covered")].mean(1)
    large = truth > 3 * error
    return {
        "updates": len(truth),
        "updates that improve": float((truth > 0).mean()),
        "covered": float(covered.mean()),
        "its standard error": float(covered_W.std(ddof=1) / len(covered_W) ** 0.5),
        "certified": float(certified.mean()),
        "of them improve": ratio(certified[truth > 0].sum(), certified.sum()),
        "called harmful": float(harmful.mean()),
        "of them harm": ratio(harmful[truth < 0].sum(), harmful.sum()),
        "improve by over 3 errors": float(large.mean()),
        "of them certified": ratio(certified[large].sum(), large.sum()),
    }


def ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("triples", 10_000), ("updates", 260), ("seed", 0), ("processes", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(given.triples, "triples:", triples(given.triples, np.random.default_rng(given.seed)))
    with ProcessPoolExecutor(
        given.processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        for probe, group in ((64, 4), (32, 8), (32, 4), (16, 8)):
            found = shares(given.updates, probe, group, given.seed, partial(pool.map, chunksize=4))
            print(f"probe of {probe} x {group}:", {name: round(share, 4) for name, share in found.items()}, flush=True)
