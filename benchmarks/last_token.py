#!/usr/bin/env python3
"""Time and processor time from the last token of a batch until the batch is ready to be learned from, without a GPU.

    python benchmarks/last_token.py --tokenizer smollm2 --problems data/gsm8k [--rounds 15] [--cores 1 8]

In lock-step, a GPU waits meanwhile. All responses end at once, as those of an untrained model do at the length limit.
They are GSM8K's written solutions without the line that states the answer, and count as cut off. The engine only hands
them out. All else is Solera's own code: episodes, text, grades, store, draw, advantages. `--cores` compares numbers of
cores that Solera is told of. From four on, other processes grade.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

import numpy as np
from transformers import AutoTokenizer

from solera.config import Config, TaskConfig
from solera.models.codec import TokenizerCodec
from solera.objectives.objective import compose
from solera.protocols import Work
from solera.records import Completion, PolicyVersion, Sampling
from solera.run.parts import resolved
from solera.run.process import rare_garbage_collection
from solera.run.task import build_task
from solera.store.database import place_of
from solera.store.deferred import Deferred
from solera.store.ledger import Ledger
from solera.training.collation import collate
from solera.training.supply import LockStep

PROMPTS, GROUP, TOKENS, FIRST = 64, 8, 256, 5
NOW = PolicyVersion("run", 0)


class AtOnce:
    """An engine whose responses all end when those of the whole batch are asked for."""

    dtype, max_length, slots, version, sampled, work = "float32", None, PROMPTS * GROUP, 0, 0, Work()

    def __init__(self, texts: list[np.ndarray]) -> None:
        self.texts, self.rng = texts, np.random.default_rng(0)
        self.waiting: list[tuple[asyncio.Future[Completion], Sampling]] = []

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        loop = asyncio.get_running_loop()
        self.waiting.append((loop.create_future(), sampling))
        if len(self.waiting) == self.slots:
            loop.call_soon(self.end)
        return await self.waiting[-1][0]

    def end(self) -> None:
        waiting, self.waiting = self.waiting, []
        given = [(answer, self._completion(sampling)) for answer, sampling in waiting]
        self.clock, self.processor = time.perf_counter(), time.process_time()
        for answer, completion in given:
            answer.set_result(completion)

    def _completion(self, sampling: Sampling) -> Completion:
        text = self.texts[self.rng.integers(len(self.texts))]
        logp = np.full(len(text), -0.5, np.float32)
        return Completion(text, logp, ((len(text), NOW.version),), "length", NOW.lineage, sampling)


def measure(config: Config, codec: TokenizerCodec, texts: list[np.ndarray], rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of each batch that passed, and of processor time of this process."""
    engine, objective, found = AtOnce(texts), compose(config.objective), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder:
        store = Deferred(Ledger(place_of(None, Path(folder))))
        supply = LockStep(
            build_task(config, codec), engine, store, sampling=Sampling(1.0, TOKENS), group_size=GROUP, reserve=0,
            seed=0, host_is_free=True,
        )  # fmt: skip
        for version in range(FIRST + rounds):
            supply.wait(PROMPTS, NOW)
            batch = collate(store.draw(PROMPTS, GROUP, NOW), objective, now=version, lineage=NOW.lineage, seed=0)
            since = time.perf_counter() - engine.clock, time.process_time() - engine.processor
            found.append((1000 * since[0], 1000 * since[1]))
            store.record(batch.uses)
        supply.close()
        store.ledger.close()
    return found[FIRST:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face folder")
    parser.add_argument("--problems", required=True, help="a folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--rounds", type=int, default=15, help="measured batches of each of three turns")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    codec = TokenizerCodec(tokenizer, (tokenizer.eos_token_id,))
    config = resolved(replace(Config(), task=TaskConfig("gsm8k", path=given.problems)))
    rows = (Path(given.problems) / "train.jsonl").read_text(encoding="utf-8").splitlines()[:2000]
    solutions = [json.loads(row)["answer"].split("####")[0] for row in rows]
    texts = [np.array(codec.encode(solution)[:TOKENS], np.int32) for solution in solutions]
    spent: dict[int, list[tuple[float, float]]] = {cores: [] for cores in given.cores}
    real = os.cpu_count()
    with rare_garbage_collection():
        for cores in given.cores * 3:
            os.cpu_count = lambda cores=cores: cores
            spent[cores] += measure(config, codec, texts, given.rounds)
    print(f"{PROMPTS * GROUP} responses of {np.mean([len(text) for text in texts]):.0f} tokens, on {real} cores:")
    for cores, several in spent.items():
        (low, middle, high), (_, processor, _) = (quantiles(each, n=4) for each in zip(*several, strict=True))
        print(f"told of {cores}: {middle:.0f} ms ({low:.0f}–{high:.0f}), of this process {processor:.0f} ms")


if __name__ == "__main__":
    main()
