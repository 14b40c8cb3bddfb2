#!/usr/bin/env python3
"""Processor time that the engine's host work takes for a chunk of eight tokens, and for a sync, without a GPU.

    python benchmarks/host_time.py [--rows 1024] [--chunks 200]

The decoder is Solera's own, except that a step only writes its tables, and prompts are not computed. So what remains is
what the host does beside the GPU: finding out which rows have ended, giving their slots and pages to others, and
admitting groups of eight responses. Responses end at random after 130 tokens on average, 256 at most. At a sync with
`sync.in_flight = "keep"`, the host prepares that everything under way is computed again.
"""

import argparse
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.engines.continuous import ContinuousDecoder
from solera.engines.jobs import Job, Kind
from solera.engines.tables import ALIVE, LIMIT, REQUEST, STEP, Memory
from solera.models.language_model import LanguageModel
from solera.records import Sampling

GROUP, LIMIT_TOKENS, USUAL_TOKENS, FIRST_CHUNKS, SYNCS = 8, 256, 130, 40, 20
ROOM = 4_000_000
"""Tokens that fit into memory: no row ever gives way."""


class WithoutModel(ContinuousDecoder):
    """Ends rows at random, and counts the processor time of doing so."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)  # type: ignore[arg-type]
        self.graphed = True  # the host learns a chunk late what has ended, as on a GPU
        self.rng, self.faking = np.random.default_rng(0), 0.0

    def _room(self) -> int:
        return ROOM

    def _compute(self, *_: object) -> None:
        """Prompts cost nothing."""

    def steps(self, memory: Memory, rows: int, kind: Kind, tokens: int) -> None:
        start = time.thread_time()
        table = memory.row_table[:, :rows].numpy()
        for _ in range(tokens):
            alive, step = table[ALIVE] > 0, table[STEP]
            request = np.where(alive, table[REQUEST], memory.requests)
            ended = self.rng.random(rows) < 1 / USUAL_TOKENS
            memory.length_B.numpy()[request] = step + 1
            memory.finished_B.numpy()[request] = ended
            table[ALIVE] *= ~ended & (step + 1 < table[LIMIT])
            table[STEP] += table[ALIVE]
        self.faking += time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    decoder = WithoutModel(LanguageModel(LlamaForCausalLM(config).eval()), (0,), given.rows)
    rng, left = np.random.default_rng(1), dict[tuple[int, ...], int]()

    def admit(groups: int) -> int:
        """Returns how many were not admitted."""
        if not groups:
            return 0
        prompts = [tuple(rng.integers(1, 299, int(rng.integers(60, 160))).tolist()) for _ in range(groups)]
        seeds = rng.integers(0, 2**60, groups * GROUP).tolist()
        sampling = Sampling(1.0, LIMIT_TOKENS)
        jobs = [Job(prompts[n // GROUP], sampling, seed, LIMIT_TOKENS) for n, seed in enumerate(seeds)]
        if not decoder.admit(jobs):
            return groups
        left.update(dict.fromkeys(prompts, GROUP))
        return 0

    waiting, ended, advancing, admitting = admit(given.rows * 5 // 4 // GROUP), 0, 0.0, 0.0
    for chunk in range(FIRST_CHUNKS + given.chunks):
        if chunk == FIRST_CHUNKS:
            ended, advancing, admitting, decoder.faking = 0, 0.0, 0.0, 0.0
        start = time.thread_time()
        written = decoder.advance()
        advancing += time.thread_time() - start
        for each in written:
            left[each.job.token_ids] -= 1
        done = [prompt for prompt, count in left.items() if not count]
        for prompt in done:
            del left[prompt]
        ended += len(written)
        start = time.thread_time()
        waiting = admit(waiting + len(done))
        admitting += time.thread_time() - start
    start = time.thread_time()
    for _ in range(SYNCS):
        decoder.recompute()
    again = time.thread_time() - start
    per_chunk = 1000 / given.chunks
    print(
        f"{given.rows} rows, {ended / given.chunks:.1f} responses end per chunk of 8 tokens: "
        f"{(advancing - decoder.faking) * per_chunk:.2f} ms to advance, {admitting * per_chunk:.2f} ms to admit "
        f"others; {again * 1000 / SYNCS:.1f} ms at a sync"
    )


if __name__ == "__main__":
    main()
