"""Measure the error of 16-bit log-probabilities against float32: of the engine, the learner, and a plain pass.

python benchmarks/precision.py MODEL PROBLEMS [--prompts 64 --samples 2 --tokens 256 --compute float16 bfloat16]

PROBLEMS as for `solera bench`. The engine samples responses. The error is the mean absolute difference between a
token's log-probability and that of the Hugging Face module in float32, run on one response at a time.
"""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import torch

from solera.config import LearnConfig, ObjectiveConfig
from solera.engines.in_process import InProcessEngine
from solera.learner.learner import Learner
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.records import Completion, Prompt, Rollout, Sampling
from solera.streams import stream_seed


def written(engine: InProcessEngine, prompts: list[Prompt], samples: int, sampling: Sampling) -> list[Rollout]:
    async def gather() -> list[Rollout]:
        wanted = list(itertools.product(enumerate(prompts), range(samples)))
        tasks = [engine.generate(prompt.token_ids, sampling, stream_seed(p, g)) for (p, prompt), g in wanted]
        done: list[Completion] = await asyncio.gather(*tasks)
        return [Rollout.of(prompt, completion) for ((_, prompt), _), completion in zip(wanted, done, strict=True)]

    return asyncio.run(gather())


@torch.no_grad()
def plain(model: LanguageModel, rollouts: list[Rollout]) -> np.ndarray:
    parts = []
    for rollout in rollouts:
        (sequence,) = rollout.sequences
        ids = torch.tensor(sequence.token_ids_T, device=model.device, dtype=torch.int64)
        start = sequence.spans[0].start
        logits = model.module(input_ids=ids[None]).logits[0, start - 1 : -1].float()
        parts.append(torch.log_softmax(logits, -1).gather(1, ids[start:, None])[:, 0].cpu().numpy())
    return np.concatenate(parts)


def learners(model: LanguageModel, rollouts: list[Rollout], compute: torch.dtype) -> np.ndarray:
    """Log-probabilities of the learner, with tokens in the order of the responses."""
    objective = compose(resolve(ObjectiveConfig("reinforce")))
    learner = Learner(
        model, objective, LearnConfig(lr=3e-4), lineage="precision", temperature=1.0, limit=256, steps=1,
        compute=compute, reference=None, compiled=True,
    )  # fmt: skip
    with torch.no_grad():
        scored = learner.score(tuple(rollouts))
    return scored.logp_T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("problems")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--compute", nargs="+", default=["float16", "bfloat16"])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, codec = loading.load(options.model, device)
    lines = Path(options.problems).read_text().splitlines()[: options.prompts]
    prompts = [Prompt(str(n), codec.encode(json.loads(line)["prompt"])) for n, line in enumerate(lines)]
    for compute in (getattr(torch, name) for name in options.compute):
        engine = InProcessEngine(
            model.for_compute(compute, copied=True), codec.end_token_ids, 512, compute, compiled=True
        )
        rollouts = written(engine, prompts, options.samples, Sampling(1.0, options.tokens))
        exact = plain(model, rollouts)
        late = np.concatenate([np.arange(rollout.length) >= options.tokens * 3 // 4 for rollout in rollouts])
        ours = np.concatenate([rollout.sequences[0].span_logp for rollout in rollouts])
        learned, theirs = learners(model, rollouts, compute), plain(model.copy(compute), rollouts)
        far = {
            "engine": np.abs(ours - exact), "engine, last quarter": np.abs(ours - exact)[late],
            "learner": np.abs(learned - exact), "engine from learner": np.abs(ours - learned),
            "a plain pass": np.abs(theirs - exact),
        }  # fmt: skip
        print(f"{compute}, {len(ours)} tokens: " + ", ".join(f"{name} {x.mean():.4f}" for name, x in far.items()))


if __name__ == "__main__":
    main()
