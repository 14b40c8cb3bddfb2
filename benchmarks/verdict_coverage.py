"""Are the verdicts on updates right? Judge updates of a real run on many probes, and compare with the true change.

python benchmarks/verdict_coverage.py RECIPE.toml --out coverage.jsonl --lr 1e-5 1e-4 [--minutes 8] ...
python benchmarks/verdict_report.py coverage.jsonl [more.jsonl ...]

A *segment* is one sync and the batches after it: the engine keeps its weights α, so the data gets older. In each
segment, one update is judged in each band of AGES. Segments go through the learning rates; every second one continues
from the weights where the segment before it ended, the others start from the model again.

For each judged update (π_k to π), α writes 25 fresh probes at the sync, as a run does (64 held-out prompts × 4
responses). Each gives an estimate with its interval and verdict. The truth is estimated from a large sample to all
held-out prompts, half written by π_k and half by π, and scored under both. With m = (π_k + π)/2 and w = π/π_k,

    J(π) − J(π_k) = E_m[(π − π_k)/m · (r − c)] = E_m[2(w − 1)/(w + 1) · (r − c)],

whose weights lie in (−2, 2), so that no rare response can dominate it. c is the mean reward of other responses to the
same prompt. The sample grows until its standard error is a tenth of the probes' half-width (`--precision`).

Each update is one line of the output file, with the estimate of every prompt of every probe, so that other intervals
can be tried later. The script adds to the file what is missing in it, within `--minutes`. So it can be stopped and
continued, also on another machine: only the file is needed. With other seeds, it measures other updates.
"""

import argparse
import copy
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solera.batch import Scored
from solera.config import DiagnoseConfig, EvaluateConfig, load, override
from solera.diagnosis.divergence import LogRatios
from solera.diagnosis.improvement import estimate_improvement, group_estimates
from solera.objectives.ratio import bounded_exp, response_sum
from solera.protocols import Engine
from solera.records import Prompt, Rollout, Sampling
from solera.run.build import build_loop
from solera.run.parts import load_parts, resolved
from solera.run.process import rare_garbage_collection, torch_for
from solera.store.ledger import Ledger
from solera.streams import stream_seed
from solera.tasks.episodes import attempt_all
from solera.training.loop import Loop

NORMAL_95 = 1.96
AGES = ((0, 0), (1, 4), (5, 10), (11, 19))
"""In each band, one update of a segment is judged: the age of its batch."""
PROBE_PROMPTS, PROBE_GROUP = DiagnoseConfig.probe_prompts, DiagnoseConfig.probe_group
MOST_CHUNKS = 8
"""Most times that the sample for the truth is enlarged. One chunk has 4 responses to each held-out prompt."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Graded responses, and the log-probabilities of their tokens under some policies."""

    rollouts: tuple[Rollout, ...]
    reward_B: Tensor
    group_B: Tensor
    """Number of the prompt, counted over all probes."""

    def log_w(self, scored: Scored, other: Scored) -> Tensor:
        """`log π(y)/π'(y)` of each response."""
        difference_T = torch.from_numpy(scored.logp_T.astype(np.float64) - other.logp_T)
        return response_sum(difference_T, torch.from_numpy(scored.response_T), len(self.rollouts))


class Study:
    """The loop of a run, advanced by hand."""

    def __init__(self, loop: Loop, sampling: Sampling, seed: int, probes: int, precision: float) -> None:
        self.loop, self.sampling, self.seed, self.probes, self.precision = loop, sampling, seed, probes, precision
        self.learner = loop.learner
        self.prompts = loop.evaluator.exam.prompts
        self._first = self.weights()
        self._fresh = copy.deepcopy(self.learner.state())

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.learner.model.parameters().values()]

    @torch.no_grad()
    def put(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self.learner.model.parameters().values(), weights, strict=True):
            parameter.copy_(value)
        self.learner.compute_weights.follow()

    def begin(self, rate: float, again: bool) -> None:
        """Begin a segment: the learning rate, an optimiser without memory and, with `again`, the first weights."""
        self.learner.config = dataclasses.replace(self.learner.config, lr=rate)
        if again:
            self.put(self._first)
        self.learner.restore(self.learner.lineage, self.learner.version, copy.deepcopy(self._fresh))
        self.loop.delivery.deliver()

    def learn(self) -> None:
        _, groups = self.loop.draw()
        self.loop.supply.drawn(groups, ahead=0)
        batch = self.loop.collate(groups)
        self.learner.update(batch)
        self.loop.store.record(batch.uses)

    def write(self, engine: Engine, attempts: list[tuple[int, Prompt, int]]) -> Written:
        """Let an engine respond. An attempt is (number of its group, prompt, seed)."""
        given = [(prompt, seed) for _, prompt, seed in attempts]
        rollouts = attempt_all(self.loop.probe.task, engine, given, self.sampling, events=self.loop.probe.events)
        assert all(rollout.reward is not None and rollout.length for rollout in rollouts)
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        return Written(tuple(rollouts), rewards, torch.tensor([number for number, _, _ in attempts]))

    def fresh_probes(self, segment: int, age: int) -> tuple[Written, Scored]:
        """Probes that α writes, for one update, and their scores under α, which are the learner's weights now."""
        attempts = []
        for probe in range(self.probes):
            chosen = Random(stream_seed(self.seed, segment, age, probe)).sample(self.prompts, PROBE_PROMPTS)
            for number, prompt in enumerate(chosen):
                seeds = [stream_seed(self.seed, segment, age, probe, number, member) for member in range(PROBE_GROUP)]
                attempts += [(probe * PROBE_PROMPTS + number, prompt, seed) for seed in seeds]
        written = self.write(self.loop.engine, attempts)
        return written, self.learner.score(written.rollouts)

    def judge(self, segment: int, age: int, probes: Written, alpha: Scored) -> dict[str, Any]:
        """Learn from a batch, judge the update on all probes, and measure what it truly changed."""
        proximal, before = self.learner.score(probes.rollouts), self.weights()
        self.learn()
        after, scored = self.weights(), self.learner.score(probes.rollouts)
        w_B, proximal_w_B = (bounded_exp(probes.log_w(one, alpha)) for one in (scored, proximal))
        gains_P = group_estimates(w_B, proximal_w_B, probes.reward_B, probes.group_B, self.probes * PROBE_PROMPTS)
        gains = gains_P.view(self.probes, -1)
        said = self.verdicts(probes, w_B, proximal_w_B, (gains.std(1) / PROBE_PROMPTS**0.5).tolist())
        half = float(np.median([NORMAL_95 * one["error"] for one in said]))
        ratios = LogRatios(scored.logp_T - alpha.logp_T, scored.response_T, np.ones(len(probes.rollouts)))
        return {
            **self.truth(segment, age, before, after, half),
            "divergence": ratios.divergences(), "reward": probes.reward_B.mean().item(), "probes": said,
            "gains": [[float(f"{gain:.5g}") for gain in row] for row in gains.tolist()],
        }  # fmt: skip

    def verdicts(self, probes: Written, w_B: Tensor, proximal_w_B: Tensor, errors: list[float]) -> list[dict[str, Any]]:
        """What a run would say on each probe, and the standard error of its estimate."""
        found = []
        for probe, error in enumerate(errors):
            of_it = probes.group_B // PROBE_PROMPTS == probe
            group_B = probes.group_B[of_it] - probe * PROBE_PROMPTS
            one = estimate_improvement(w_B[of_it], proximal_w_B[of_it], probes.reward_B[of_it], group_B)
            assert one is not None
            state = int(one.metrics()["improvement/state"])
            found.append(
                {"gain": one.gain, "error": error, "mean_w": one.mean_w, "covered": one.covered, "state": state}
            )
        return found

    def truth(self, segment: int, age: int, before: list[Tensor], after: list[Tensor], half: float) -> dict[str, Any]:
        """The true change and its standard error, from as many chunks as the precision needs. Leaves π in place."""
        chunks: list[Tensor] = []
        while True:
            chunks.append(self.chunk(stream_seed(self.seed, segment, age, len(chunks), 1 << 20), before, after))
            gain_NP = torch.cat(chunks)
            pairs, prompts = gain_NP.shape
            error = math.sqrt(gain_NP.var(0).mean().item() / pairs / prompts)  # all prompts are in it: only within them
            if error <= self.precision * half or len(chunks) == MOST_CHUNKS:
                responses = 2 * pairs * prompts
                return {"truth": gain_NP.mean().item(), "truth_error": error, "truth_responses": responses}

    def chunk(self, seed: int, before: list[Tensor], after: list[Tensor]) -> Tensor:
        """For each held-out prompt, the mean of h·(r − c) in each of two pairs. A pair is a response of π_k and one of
        π, and c is the mean reward of the other pair, which does not depend on this one. `[N, P]`"""
        parts = []
        for policy, weights in enumerate((before, after)):
            self.put(weights)
            attempts = [
                (number, prompt, stream_seed(seed, policy, pair, number))
                for pair in range(2)
                for number, prompt in enumerate(self.prompts)
            ]
            parts.append(self.write(self.loop.evaluator.exam.engine, attempts))
        rollouts = (*parts[0].rollouts, *parts[1].rollouts)
        both = Written(rollouts, torch.cat([part.reward_B for part in parts]), torch.empty(0))
        under_after = self.learner.score(rollouts)
        self.put(before)
        under_before = self.learner.score(rollouts)
        self.put(after)
        h = 2 * torch.tanh(both.log_w(under_after, under_before) / 2)  # 2(w − 1)/(w + 1)
        shape = 2, 2, len(self.prompts)  # policy, pair, prompt
        h, reward = h.view(shape), both.reward_B.view(shape)
        return (h * (reward - reward.mean(0, keepdim=True).flip(1))).mean(0)


@contextmanager
def study_of(options: argparse.Namespace) -> Iterator[Study]:
    config = load(options.recipe)
    if options.model:
        config = override(config, "model", path=options.model)
    if options.task:
        config = override(config, "task", path=options.task)
    config = override(config, "sync", period=1 + max(last for _, last in AGES), rule="every")
    config = override(config, "learn", warmup=0, decay="constant")
    config = override(config, "run", seed=options.seed, device=options.device, name="coverage")
    config = override(config, "collect", overlap=False)
    config = dataclasses.replace(
        config, evaluate=EvaluateConfig(every=0, problems=options.problems), diagnose=DiagnoseConfig(every=0)
    )
    config = resolved(config)
    parts = load_parts(config, say=lambda sentence: print("note:", sentence, flush=True))
    with tempfile.TemporaryDirectory() as folder, torch_for(parts.model, config.run), rare_garbage_collection():
        store = Ledger(Path(folder) / "store.db")
        loop = build_loop(parts, store, NoSink(), Path(folder))
        sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens)
        try:
            yield Study(loop, sampling, options.seed, options.probes, options.precision)
        finally:
            loop.supply.close()
            loop.engine.close()
            store.close()


class NoSink:
    def log(self, step: int, metrics: Any) -> None: ...

    def close(self) -> None: ...


def measure(options: argparse.Namespace) -> None:
    end, longest = time.monotonic() + 60 * options.minutes, 0.0
    done = done_in(options.out, options.seed)
    wanted = range(options.first, options.first + options.segments)
    pairs = sorted({segment // 2 for segment in wanted if any((segment, b) not in done for b in range(len(AGES)))})
    with study_of(options) as study, options.out.open("a") as out:
        for segment in (2 * pair + half for pair in pairs for half in (0, 1)):
            rate = options.lr[segment % len(options.lr)]
            drawn = Random(stream_seed(options.seed, segment))
            ages = [drawn.randint(*band) for band in AGES]
            missing = [age for band, age in enumerate(ages) if (segment, band) not in done]
            if segment % 2 and not missing:
                continue  # nothing starts from its weights
            study.begin(rate, again=segment % 2 == 0)
            start = time.monotonic()
            probes = {age: study.fresh_probes(segment, age) for age in missing}
            writing = (time.monotonic() - start) / max(1, len(missing))
            for age in range(ages[-1] + 1):
                start = time.monotonic()
                if start + longest > end:
                    print("the time is up; the same command continues", flush=True)
                    return
                if age not in missing:
                    study.learn()
                    continue
                line = {"segment": segment, "band": ages.index(age), "seed": options.seed, "lr": rate, "age": age}
                line |= study.judge(segment, age, *probes[age])
                longest = max(longest, time.monotonic() - start)
                line["seconds"] = writing + time.monotonic() - start
                out.write(json.dumps(line) + "\n")
                out.flush()
                print(words(line), flush=True)


def done_in(file: Path, seed: int) -> set[tuple[int, int]]:
    """Segment and band of each update of this seed in the output file."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {(line["segment"], line["band"]) for line in lines if line["seed"] == seed}


def words(line: dict[str, Any]) -> str:
    gains, errors = (np.array([probe[name] for probe in line["probes"]]) for name in ("gain", "error"))
    inside = np.mean(abs(gains - line["truth"]) <= NORMAL_95 * errors)
    return (
        f"segment {line['segment']} lr {line['lr']:g} age {line['age']}: truth {line['truth']:+.5f} ± "
        f"{line['truth_error']:.5f} ({line['truth_responses']} responses), probes {gains.mean():+.5f} ± "
        f"{errors.mean():.5f}, {inside:.0%} cover it, {line['seconds']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--task", help="task.path")
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first segment")
    parser.add_argument("--segments", type=int, default=10)
    parser.add_argument("--probes", type=int, default=25)
    parser.add_argument("--problems", type=int, default=1319, help="held-out problems")
    parser.add_argument("--precision", type=float, default=0.1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
