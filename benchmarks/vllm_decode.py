#!/usr/bin/env python3
"""Time the decoding of Solera's engine or of vLLM: same weights, same prompts, same number of tokens.

    python benchmarks/vllm_decode.py FOLDER --write 1.5b                                  # random weights
    python benchmarks/vllm_decode.py FOLDER --engine solera --work 64x8x256 16x8x4096
    python benchmarks/vllm_decode.py FOLDER --engine vllm --work 64x8x256 16x8x4096

A work is prompts x responses per prompt x tokens of each response. No response ends early. A round is timed from the
first request to the last token, prompts included, and printed at once. Both engines return the log-probability of
every token; vLLM is also timed without (`--plain`). The first round of Solera's engine compiles and records graphs.
vLLM runs through its `LLM` class: no HTTP, no text, no seeds of single requests, all of which would slow it down.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from decode_step import SIZES
from lean_memory import model_of, tokenizer_of

Work = tuple[int, int, int]
Write = Callable[[list[tuple[int, ...]], int, bool], int]
"""Continues prompts with so many tokens each, with or without log-probabilities. Returns the number of tokens."""
CAPTURED = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of rows for which vLLM records CUDA graphs, up to the work's own. All rows run to the end, so more are not
needed."""


def write_model(size: str, compute: str, folder: Path, device: str) -> None:
    tokenizer = tokenizer_of(SIZES[size]["vocab_size"])
    model = model_of(size, tokenizer, torch.device(device))
    model.module.to(getattr(torch, compute)).save_pretrained(folder, max_shard_size="4GB")
    tokenizer.save_pretrained(folder)


def prompts_of(work: Work, length: int) -> list[tuple[int, ...]]:
    """A prompt for each response. Those of a group are equal."""
    groups = [tuple((7 * n + 11 * group) % 250 + 3 for n in range(length)) for group in range(work[0])]
    return [prompt for prompt in groups for _ in range(work[1])]


@contextmanager
def solera(options: argparse.Namespace) -> Iterator[Write]:
    from transformers import AutoModelForCausalLM

    from solera.engines.in_process import InProcessEngine
    from solera.models.language_model import LanguageModel
    from solera.records import Completion, Sampling
    from solera.tasks.event_loop import EventLoop

    on_gpu, compute = options.device == "cuda", getattr(torch, options.compute)
    module = AutoModelForCausalLM.from_pretrained(options.folder, dtype=compute).to(options.device).eval()
    model = LanguageModel(module)
    model.can_take_plans = True  # `check` finds this out, in float32
    never = (module.config.vocab_size + 1,)
    rows = max(prompts * group for prompts, group, _ in options.work)
    engine = InProcessEngine(model.for_compute(compute, copied=True), never, rows, compute, compiled=on_gpu, early=True)
    del model, module

    async def all_of(prompts: list[tuple[int, ...]], tokens: int) -> list[Completion]:
        asked = (engine.generate(prompt, Sampling(1.0, tokens), seed) for seed, prompt in enumerate(prompts))
        return await asyncio.gather(*asked)

    with EventLoop() as events:
        yield lambda prompts, tokens, _: sum(len(one.token_ids_T) for one in events.run(all_of(prompts, tokens)))


@contextmanager
def vllm(options: argparse.Namespace) -> Iterator[Write]:
    from vllm import LLM, SamplingParams

    rows = max(prompts * group for prompts, group, _ in options.work)
    on_gpu = {
        "gpu_memory_utilization": options.gpu_memory,
        "cudagraph_capture_sizes": sorted({*(size for size in CAPTURED if size < rows), rows}),
    }
    llm = LLM(
        model=str(options.folder), dtype=options.compute, max_num_seqs=rows,
        max_model_len=options.prompt + max(tokens for _, _, tokens in options.work),
        logprobs_mode="processed_logprobs", generation_config="vllm",
        **(on_gpu if options.device == "cuda" else {"enforce_eager": True}),
    )  # fmt: skip

    def write(prompts: list[tuple[int, ...]], tokens: int, with_logp: bool) -> int:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0 if with_logp else None
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        written = llm.generate(asked, sampling, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in written)

    def without_cache(prompts: list[tuple[int, ...]], tokens: int, with_logp: bool) -> int:
        llm.reset_prefix_cache()  # or a round would find the prompts of the one before
        return write(prompts, tokens, with_logp)

    write(prompts_of((1, 2, 0), options.prompt), 2, True)
    yield without_cache


def measure(name: str, write: Write, options: argparse.Namespace) -> None:
    for work in options.work:
        prompts, tokens = prompts_of(work, options.prompt), work[2]
        rounds = [True] * options.rounds + [False] * (options.plain and name == "vllm")
        for number, with_logp in enumerate(rounds, 1):
            start = time.perf_counter()
            written = write(prompts, tokens, with_logp)
            took = time.perf_counter() - start
            if written != len(prompts) * tokens:
                raise SystemExit(f"{written} tokens instead of {len(prompts) * tokens}")
            manner = "" if with_logp else ", without log-probabilities"
            print(
                f"{name}, {options.compute}, {'x'.join(map(str, work))}, round {number}{manner}: {took:.2f} s, "
                f"{written / took:,.0f} tokens/s, {1000 * took / tokens:.3f} ms per token of all rows", flush=True,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", choices=SIZES, help="write a model with random weights to the folder first")
    parser.add_argument("--engine", choices=("solera", "vllm"))
    parser.add_argument(
        "--work", type=lambda text: tuple(map(int, text.split("x"))), nargs="+", default=[(64, 8, 256)],
        help="prompts x responses per prompt x tokens",
    )  # fmt: skip
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--compute", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="vLLM: one more round without log-probabilities")
    parser.add_argument("--gpu_memory", type=float, default=0.85, help="vLLM: share of the GPU's memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.write is not None:
        write_model(options.write, options.compute, options.folder, options.device)
        print(f"written in {time.perf_counter() - start:.0f} s", flush=True)
    if options.engine is not None:
        with {"solera": solera, "vllm": vllm}[options.engine](options) as write:
            print(f"{options.engine} is ready after {time.perf_counter() - start:.0f} s", flush=True)
            measure(options.engine, write, options)


if __name__ == "__main__":
    main()
