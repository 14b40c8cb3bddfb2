#!/usr/bin/env python3
"""How fast does the engine write if it is kept full: alone, beside a learner, and in a process of its own?

    python benchmarks/full_engine.py [--size smollm2] [--seconds 8] [--parts alone beside apart]

Random weights. Groups of eight responses to a prompt of 60 to 160 tokens; each response gets 130 tokens on average, 256
at most. New groups are admitted as in a streaming run: 1.25 responses are asked for per row, and new ones when one in
eight of these has ended. `--admit 8x1.25 4x1.5` compares that with other numbers. The learner takes batches of 64
groups, of which six are not flat, one after the other. Nothing is synced, stored or graded. With `apart`, the engine is
in another process on the same GPU; start NVIDIA's MPS first, or they take turns on it.
"""

import argparse
import asyncio
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
import torch
from decode_step import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from solera.batch import Batch
from solera.config import LearnConfig, ObjectiveConfig
from solera.engines.in_process import InProcessEngine
from solera.learner.learner import Learner
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.protocols import Weights
from solera.records import Completion, Group, Prompt, Reward, Rollout, Sampling
from solera.training.collation import collate
from solera.training.stream import FREE_SHARE, OVERSUBSCRIBED

PARTS = ("alone", "beside", "apart")
GROUP, BATCH, LIVE, LIMIT, USUAL = 8, 64, 6, 256, 130
SETTLING = 2.0
Admission = tuple[int, float]
"""New groups when one in so many responses has ended, and responses asked for per row."""
ADMISSION: Admission = (FREE_SHARE, OVERSUBSCRIBED)
OBJECTIVE = compose(resolve(ObjectiveConfig("off_policy_grpo")))


def model_of(size: str) -> LanguageModel:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**SIZES[size], max_position_embeddings=4096)
    model = LanguageModel(LlamaForCausalLM(config).to(device).eval())
    model.can_take_plans = True  # a Llama can
    return model


def type_of(model: LanguageModel) -> torch.dtype:
    return torch.float16 if model.device.type == "cuda" else torch.float32


def length(rng: np.random.Generator) -> int:
    return min(LIMIT, 1 + int(rng.exponential(USUAL)))


def prompt(rng: np.random.Generator, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.integers(3, vocabulary, int(rng.integers(60, 160))).tolist())


class Full:
    """An engine that is kept full in a thread of its own."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        on_gpu, dtype = model.device.type == "cuda", type_of(model)
        copied = model.for_compute(dtype, copied=True)
        self.engine = InProcessEngine(copied, (2**30,), rows, dtype, on_gpu, beside=on_gpu, early=True)
        self.engine.load(Weights("full", 0, iter(copied.parameters().items())))
        self.tokens = 0
        self.admission = ADMISSION
        self._vocabulary = model.module.config.vocab_size
        self._rng = np.random.default_rng(1)
        self._stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep_full()), name="full")
        self._thread.start()

    async def _keep_full(self) -> None:
        running = set[asyncio.Task[None]]()
        while not self._stop or running:
            free_share, oversubscribed = self.admission
            wanted = int(self.engine.slots * oversubscribed)
            free = wanted - len(running)
            if not self._stop and (not running or free * free_share >= wanted):
                for _ in range(free // GROUP):
                    text = prompt(self._rng, self._vocabulary)
                    running |= {asyncio.create_task(self._write(text)) for _ in range(GROUP)}
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    async def _write(self, text: tuple[int, ...]) -> None:
        sampling, seed = Sampling(1.0, length(self._rng)), int(self._rng.integers(2**60))
        written = await self.engine.generate(text, sampling, seed)
        self.tokens += len(written.token_ids_T)

    def close(self) -> None:
        self._stop = True
        self._thread.join()


def batch_of(rng: np.random.Generator, vocabulary: int, version: int) -> Batch:
    groups = []
    for number in range(BATCH):
        asked, members = Prompt(f"{version}/{number}", prompt(rng, vocabulary)), []
        for member in range(GROUP):
            tokens_T = rng.integers(3, vocabulary, length(rng)).astype(np.int32)
            logp_T = (-9 - rng.random(len(tokens_T))).astype(np.float32)
            written = Completion(tokens_T, logp_T, ((len(tokens_T), version),), "stop", "full", Sampling(1.0, LIMIT))
            members.append(Rollout.of(asked, written, rewards=(Reward(float(number < LIVE and member == 0)),)))
        groups.append(Group(asked.key, tuple(members)))
    return collate(groups, OBJECTIVE, now=version, lineage="full", seed=0)


class Learning:
    """A learner with ready-made batches."""

    def __init__(self, model: LanguageModel, graphs: bool, batches: int = 8) -> None:
        self._learner = Learner(
            model, OBJECTIVE, LearnConfig(lr=1e-6, warmup=0, graphs=graphs), lineage="full", temperature=1.0,
            limit=LIMIT, steps=10**6, compute=type_of(model), reference=None, compiled=model.device.type == "cuda",
        )  # fmt: skip
        rng = np.random.default_rng(0)
        self._batches = [batch_of(rng, model.module.config.vocab_size, 0) for _ in range(batches)]
        self.learn(batches)

    def learn(self, updates: int = 0, seconds: float = 0.0) -> list[float]:
        """Seconds of each update: so many of them, or as many as fit into some seconds."""
        took, began = list[float](), time.perf_counter()
        while len(took) < updates or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            self._learner.update(self._batches[len(took) % len(self._batches)])
            took.append(time.perf_counter() - start)
        return took


def rates(full: Full, seconds: float, meanwhile: Callable[[float], list[float]]) -> tuple[float, float, list[float]]:
    """Tokens per second, the share of the time in which the engine decoded, and what the learner did meanwhile. What
    changed just before settles first."""
    meanwhile(SETTLING)
    tokens, worked, start = full.tokens, full.engine.work.seconds, time.perf_counter()
    learned = meanwhile(seconds)
    took = time.perf_counter() - start
    return (full.tokens - tokens) / took, (full.engine.work.seconds - worked) / took, learned


def waiting(seconds: float) -> list[float]:
    time.sleep(seconds)
    return []


def named(admission: Admission) -> str:
    return "{}x{}".format(*admission)


def admission_of(text: str) -> Admission:
    free_share, oversubscribed = text.split("x")
    return int(free_share), float(oversubscribed)


def tell(part: str, tokens: float, share: float, learned: list[float]) -> None:
    learner = f"; an update {1000 * median(learned):.0f} ms, {len(learned)} of them" if learned else ""
    print(f"{part}: {tokens:,.0f} tokens/s, at work {100 * share:.0f} % of the time{learner}", flush=True)


def serve(size: str, rows: int, warm: float, connection: Connection) -> None:
    """The other process: says when it is warm, and then, for each number of seconds and admission, how it did."""
    full = Full(model_of(size), rows)
    time.sleep(warm)
    connection.send(None)
    while (asked := connection.recv()) is not None:
        seconds, full.admission = asked
        connection.send(rates(full, seconds, waiting)[:2])
    full.close()


def apart(given: argparse.Namespace, learning: Learning) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(given.size, given.rows, given.warm, theirs))
    process.start()
    theirs.close()  # so that `recv` fails if the child dies
    ours.recv()
    for admission in given.admit:
        ours.send((given.seconds, admission))
        tell(f"{named(admission)}, apart, nothing beside it", *ours.recv(), [])
        ours.send((given.seconds, admission))
        learned = learning.learn(seconds=given.seconds + SETTLING)
        tell(f"{named(admission)}, apart, beside a learner", *ours.recv(), learned)
    ours.send(None)
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="smollm2")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--warm", type=float, default=15.0, help="seconds before the first one")
    parser.add_argument("--graphs", action="store_true", help="record updates (learn.graphs)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--admit", type=admission_of, nargs="+", default=[ADMISSION], metavar="8x1.25",
        help="new groups when one in so many responses has ended x responses asked for per row",
    )  # fmt: skip
    parser.add_argument(
        "--switch", type=float, nargs="+", default=[sys.getswitchinterval()],
        help="seconds after which a Python thread lets others run, `beside` a learner",
    )  # fmt: skip
    given = parser.parse_args()
    model = model_of(given.size)
    learning = Learning(model, given.graphs) if {"beside", "apart"} & set(given.parts) else None
    if learning is not None:
        print(f"the learner alone: an update {1000 * median(learning.learn(8)):.0f} ms", flush=True)
    if {"alone", "beside"} & set(given.parts):
        full = Full(model, given.rows)
        time.sleep(given.warm)
        for full.admission in given.admit:
            name = named(full.admission)
            if "alone" in given.parts:
                tell(f"{name}, alone", *rates(full, given.seconds, waiting))
            if "beside" in given.parts and learning is not None:
                for interval in given.switch:
                    sys.setswitchinterval(interval)
                    beside = rates(full, given.seconds, lambda seconds: learning.learn(seconds=seconds))
                    tell(f"{name}, beside a learner, threads switch after {1000 * interval:g} ms", *beside)
        full.close()
    if "apart" in given.parts and learning is not None:
        apart(given, learning)


if __name__ == "__main__":
    main()
