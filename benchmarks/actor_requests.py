#!/usr/bin/env python3
"""What it costs to ask an engine in a Ray actor, without a GPU.

    python benchmarks/actor_requests.py [--groups 64] [--group 8] [--tokens 130] [--bursts 20]

The engine is Solera's own, except that its decoder writes random tokens at once, a few responses in each turn. So what
remains is the way of a request to the engine and back. Each burst asks for `groups` × `group` responses together and
waits for all of them. Processor times are those of a whole process with all its threads, Ray's included. The pool adds
its own work: the choice of an engine, the time limit, and the checks of an answer.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.cluster.engines import ActorPool, EngineSpec
from solera.engines.in_process import InProcessEngine
from solera.engines.jobs import Job, Written
from solera.models.language_model import LanguageModel
from solera.models.loading import Source
from solera.protocols import Weights, Writer
from solera.records import Sampling

PROMPT_TOKENS, FIRST_BURSTS, PER_TURN = 100, 3, 16


class AtOnce:
    """A decoder that writes whole responses without a model, `PER_TURN` in each turn."""

    def __init__(self) -> None:
        self.prefilled = self.sampled = 0
        self._jobs: list[Job] = []
        self._rng = np.random.default_rng(0)

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def admit(self, jobs: list[Job]) -> int:
        self._jobs += jobs
        return len(jobs)

    def advance(self) -> list[Written]:
        ended, self._jobs = self._jobs[:PER_TURN], self._jobs[PER_TURN:]
        self.sampled += sum(job.limit for job in ended)
        return [
            Written(job, self._rng.integers(0, 9, job.limit, np.int32), np.zeros(job.limit, np.float32), False)
            for job in ended
        ]

    def recompute(self) -> dict[Job, int]:
        return {}

    def reset(self) -> None:
        self._jobs = []

    def free(self) -> None:
        self.reset()


@dataclass(frozen=True)
class WithoutModel(EngineSpec):
    """The engine with that decoder, and a tiny model that nobody computes with."""

    def open(self, number: int) -> InProcessEngine:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=300, hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=4096,
        )  # fmt: skip
        model = LanguageModel(LlamaForCausalLM(config).eval())
        engine = InProcessEngine(model, (0,), self.max_rows, self.compute, early=True)
        engine.decoder = AtOnce()
        return engine


def processor_time(pid: int) -> float:
    """Seconds that a process has computed."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def burst(engine: Writer, groups: int, group: int, tokens: int) -> None:
    rng, sampling = np.random.default_rng(0), Sampling(1.0, tokens)
    prompts = [tuple(rng.integers(4, 9, PROMPT_TOKENS).tolist()) for _ in range(groups)]
    asked = (engine.generate(prompts[n // group], sampling, n) for n in range(groups * group))
    assert all(len(each.token_ids_T) == tokens for each in await asyncio.gather(*asked))


def measure(name: str, engine: Writer, given: argparse.Namespace, there: int | None) -> None:
    def used() -> tuple[float, ...]:
        return time.perf_counter(), time.process_time(), processor_time(there) if there else 0.0

    async def all_bursts(count: int) -> None:
        for _ in range(count):
            await burst(engine, given.groups, given.group, given.tokens)

    with asyncio.Runner() as runner:
        runner.run(all_bursts(FIRST_BURSTS))
        before = used()
        runner.run(all_bursts(given.bursts))
        after = used()
    requests = given.bursts * given.groups * given.group
    seconds, here, actor = (end - start for start, end in zip(before, after, strict=True))
    print(
        f"{name:>28}: {requests / seconds:7,.0f} requests/s, {1e3 * seconds / given.bursts:6.1f} ms per burst; "
        f"processor time per request: {1e6 * here / requests:5.0f} µs here, {1e6 * actor / requests:5.0f} µs there"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("groups", 64), ("group", 8), ("tokens", 130), ("bursts", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    spec = WithoutModel(Source("embedded"), torch.float32, 4096, 1)
    engine = spec.open(0)
    tensors = dict(engine.model.parameters())
    weights: Callable[[], Weights] = lambda: Weights("run", 1, iter(tensors.items()))  # noqa: E731
    engine.load(weights())
    measure("engine in this process", engine, given, None)
    pool = ActorPool(
        spec, 1, cpus=1, address=None, timeout=60.0, tell=lambda sampled: None, say=lambda sentence: None
    )  # fmt: skip
    try:
        pool.load(weights())
        pid = int(pool.members[0].name.split("process ")[1].split()[0])
        measure("engine in a Ray actor", pool.members[0].engine, given, pid)
        measure("the same, through the pool", pool, given, pid)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
