#!/usr/bin/env python3
"""Time the engine's decoding step on a GPU, next to that of another version of Solera.

    python benchmarks/decode_step.py --against FOLDER [--work 512x100 16x100 16x4000 --size smollm2 --rounds 3]
    python benchmarks/decode_step.py --profile --size 8b --work 256x100 256x1000

FOLDER holds the other version's `solera` package. A work is a number of rows and the tokens of their prompts, one for
eight rows. Each version has a process of its own, which compiles and records all it needs first; then the versions
take turns. Weights are random, and no response ends early: every step has all rows. It needs no network and no model
folder.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "1.5b": {
        "vocab_size": 49152, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
"""The shapes of SmolLM2-135M, of `solera bench --random_weights 1.5b` (1.56 billion weights) and of Llama 3.1 8B."""


PROFILED = 32
"""Tokens of each response that a profile covers. It keeps every kernel in memory."""
Work = tuple[int, int]
"""Rows, and tokens of their prompts."""


def prepared(options: argparse.Namespace) -> Callable[[Work, int], float]:
    """A function that decodes so many tokens for each row. Returns milliseconds per token of all rows, without the time
    of prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from solera.engines.continuous import ContinuousDecoder
    from solera.engines.jobs import Job
    from solera.models.language_model import LanguageModel
    from solera.records import Sampling

    with contextlib.suppress(ImportError):  # in versions that compute long prompts between two chunks of decoding
        from solera.engines import prompts as computing

        computing.PART = 2**20
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[options.size], max_position_embeddings=32_768)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LanguageModel(LlamaForCausalLM(config).eval())
    model.can_take_plans = True
    model = model.for_compute(getattr(torch, options.compute), copied=True) if on_gpu else model.with_plans()
    sampling = Sampling(1.0, options.tokens)
    decoder = ContinuousDecoder(model, (config.vocab_size + 1,), max(rows for rows, _ in options.work))

    def decode(work: Work, tokens: int) -> float:
        rows, length = work
        prompts = [tuple((7 * n + group) % 250 + 3 for n in range(length)) for group in range(rows)]
        jobs = [Job(prompts[row // 8], sampling, row, tokens) for row in range(rows)]
        assert decoder.admit(jobs) == rows
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        written = []
        while decoder.busy:
            written += decoder.advance()
        took = time.perf_counter() - start
        assert sum(len(each.token_ids_T) for each in written) == rows * tokens
        return took / tokens * 1000

    return decode


def show_kernels(work: Callable[[], object], per: int, unit: str, lines: int = 12) -> None:
    """Run `work` and print the GPU's time by kind of kernel, divided by `per`. Numbers in names are left out: kernels
    that differ only in their sizes are one kind."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        whole = (time.perf_counter() - start) * 1000
    kinds = dict[str, list[float]]()
    for event in profiled.key_averages():
        if event.self_device_time_total:
            kind = kinds.setdefault(re.sub(r"\d+", "N", event.key)[:70], [0.0, 0])
            kind[0] += event.self_device_time_total / 1000
            kind[1] += event.count
    busy = sum(time for time, _ in kinds.values())
    print(f"profiled: {whole / per:.3f} ms per {unit}, kernels {busy / per:.3f} ms", flush=True)
    for name, (took, count) in sorted(kinds.items(), key=lambda kind: -kind[1][0])[:lines]:
        print(f"  {took / per:9.4f} ms in {count / per:7.1f} kernels  {name}", flush=True)


def serve(options: argparse.Namespace) -> None:
    """Decode the works whose numbers come in, one per line, and answer with milliseconds per token."""
    import solera

    decode = prepared(options)
    # Tables grow in the first round, and with them all graphs are new.
    for tokens in (min(16, options.tokens), options.tokens):
        for work in options.work:
            decode(work, tokens)
    if options.profile:
        for rows, length in options.work:
            print(f"{options.size}, {rows} rows after prompts of {length} tokens", flush=True)
            show_kernels(partial(decode, (rows, length), PROFILED), PROFILED, "token of all rows, prompts included")
        return
    print(json.dumps(str(Path(solera.__file__).parent)), flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(options.work[int(line)], options.tokens)), flush=True)


class Version:
    """A version of Solera in a process of its own."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve"],
            env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.times = dict[int, list[float]]()

    def answer(self) -> Any:
        """The next line, or None if the process has failed. It has said why."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def measure(self, work: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{work}\n")
            self.process.stdin.flush()
        took = self.answer()
        if took is not None:
            self.times.setdefault(work, []).append(took)


def show(options: argparse.Namespace, versions: dict[str, Version]) -> None:
    """Medians, and the smallest and largest in brackets."""
    print(f"ms per token of all rows, {options.size}, {options.tokens} tokens; rows x prompt")
    print(f"{'':14}" + "".join(f"{rows}x{length}".rjust(24) for rows, length in options.work))
    for name, version in versions.items():
        cells = [
            f"{median(times):.4f} ({min(times):.3f}-{max(times):.3f})" if (times := version.times.get(work)) else "-"
            for work in range(len(options.work))
        ]
        print(f"{name:14}" + "".join(cell.rjust(24) for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder with the solera package of another version")
    parser.add_argument(
        "--work", type=lambda text: tuple(map(int, text.split("x"))), nargs="+", default=[(512, 100), (16, 100)],
        help="rows x tokens of their prompts",
    )  # fmt: skip
    parser.add_argument("--size", choices=SIZES, default="smollm2")
    parser.add_argument("--compute", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the time of each kind of kernel instead")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve or options.profile:
        serve(options)
        return
    versions = {"this version": Version(Path(__file__).parents[1])}
    if options.against is not None:
        versions["the other"] = Version(options.against)
    try:
        for name, version in versions.items():
            print(f"{name}: {version.answer() or 'failed'}", flush=True)
        for _ in range(options.rounds):
            for work in range(len(options.work)):
                for version in versions.values():
                    version.measure(work)
            show(options, versions)
    finally:
        for version in versions.values():
            version.process.kill()
    if any(len(version.times) < len(options.work) for version in versions.values()):
        sys.exit("not all were measured")


if __name__ == "__main__":
    main()
