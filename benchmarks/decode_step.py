#!/usr/bin/env python3
"""Time the engine's decoding step on a GPU, next to that of another version of Solera.

    python benchmarks/decode_step.py --against FOLDER [--rows 16 512 --size smollm2 --tokens 256 --rounds 3]

FOLDER holds the other version's `solera` package. Each measurement is a process of its own; the two versions take
turns. Weights are random, and no response ends early: every step has all rows. It needs no network and no model folder.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "1.5b": {
        "vocab_size": 49152, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
"""Shapes of SmolLM2-135M and of `solera bench --random_weights 1.5b`."""


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per token of all rows, for each number of rows, and the memory of keys and values in GiB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from solera.engines.continuous import ContinuousDecoder
    from solera.engines.jobs import Job
    from solera.models.language_model import LanguageModel
    from solera.records import Sampling

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[options.size], tie_word_embeddings=True, max_position_embeddings=32_768)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LanguageModel(LlamaForCausalLM(config).eval())
    model.can_take_plans = True
    model = model.for_compute(getattr(torch, options.compute), copied=True) if on_gpu else model.with_plans()
    sampling = Sampling(1.0, options.tokens)
    never = config.vocab_size + 1
    result = {}
    for rows in options.rows:
        decoder = ContinuousDecoder(model, (never,), rows)
        times = []
        for repeat in range(3):  # compiled and recorded in the first
            prompts = [
                tuple((7 * n + group + repeat) % 250 + 3 for n in range(options.prompt)) for group in range(rows)
            ]
            jobs = [Job(prompts[row // 8], sampling, row, options.tokens) for row in range(rows)]
            assert decoder.admit(jobs) == rows
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            written = []
            while decoder.busy:
                written += decoder.advance()
            times.append((time.perf_counter() - start) / options.tokens * 1000)
            assert sum(len(each.token_ids_T) for each in written) == rows * options.tokens
        result[f"{rows} rows"] = min(times[1:])
        decoder.free()
    result["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return result


def measured(folder: Path) -> dict[str, float]:
    """The same with the `solera` of this folder, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--here"],
        env=os.environ | {"PYTHONPATH": str(folder.resolve())}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder with the solera package of another version")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--size", choices=SIZES, default="smollm2")
    parser.add_argument("--compute", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt; eight responses share one")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options)))
        return
    versions = {"this version": Path(__file__).parents[1]}
    if options.against is not None:
        versions["the other"] = options.against
    results: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for number in range(options.rounds):
        for name, folder in versions.items():
            results[name].append(measured(folder))
            print(f"round {number + 1}, {name}: {results[name][-1]}", flush=True)
    for name, several in results.items():
        middle = {key: round(median(each[key] for each in several), 4) for key in several[0]}
        print(f"{name}, median of {options.rounds}, ms per token of all rows: {middle}")


if __name__ == "__main__":
    main()
