#!/usr/bin/env python3
"""Train a large random Llama for a few steps and print time, speed and peak memory of each step.

    python benchmarks/lean_memory.py --size 8b --memory lean
    python benchmarks/lean_memory.py --size 8b --lora 16
    python benchmarks/lean_memory.py --size tiny --memory lean --prompts 2 --group 4 --new_tokens 8 --device cpu

It needs no network and no model folder: the weights are drawn on the device, in float32 as a real run loads them, and
the tokenizer is made here. With random weights no response is right, so the reward is a coin toss on the response's
text; a group of equal rewards would have no gradient. The script fails if no weight changed.
"""

import argparse
import dataclasses
import itertools
import json
import resource
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import torch
from decode_step import SIZES, show_kernels
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from solera.bench.options import BenchOptions
from solera.bench.ours import Watching, configure
from solera.config import Config, RewardConfig
from solera.folder.paths import METRICS
from solera.models.codec import TokenizerCodec
from solera.models.digest import describe
from solera.models.language_model import LanguageModel, without_dropout
from solera.models.loading import with_adapter
from solera.models.source import EMBEDDED
from solera.run.build import build_loop
from solera.run.own_code import OwnCode
from solera.run.parts import Parts, compute_of, device_of, resolved
from solera.run.process import rare_garbage_collection, torch_for
from solera.run.task import build_task
from solera.store.ledger import Ledger
from solera.sync.rules import SyncState


def coin(completions: list[str], **_: Any) -> list[float]:
    """0 or 1, by the response's text. Half of a group's members earn 1 on average."""
    return [float(zlib.crc32(text.encode()) & 1) for text in completions]


class Printing(Watching):
    """Prints each step at once, so that a run that is stopped still says something."""

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        if "time/learn" in metrics:
            row, gib = self.rows[-1], peak() / 2**30
            decode = row["tokens/generated"] / row["time/decode"] if row["time/decode"] else 0.0
            print(
                f"step {step}: generate {row['time/generate']:.2f} s ({decode:,.0f} tokens/s, mean length "
                f"{row['response/length']:.0f}), learn {row['time/learn']:.2f} s, gradient norm "
                f"{row.get('learn/grad_norm', 0.0):.3g}, peak so far {gib:.1f} GiB", flush=True,
            )  # fmt: skip


def peak() -> int:
    """Bytes: of the GPU, or of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def config_of(args: argparse.Namespace) -> Config:
    options = BenchOptions(
        prompts=args.prompts, group=args.group, new_tokens=args.new_tokens, unmasked=True, micro_batch=args.micro_batch,
        device=args.device, gpu_memory=args.gpu_memory, compile=args.compile, memory=args.memory, lora=args.lora,
    )  # fmt: skip
    config = configure(options, 1, "lock_step")
    return resolved(
        dataclasses.replace(
            config,
            run=dataclasses.replace(config.run, steps=args.steps),
            reward=RewardConfig(functions=(f"{Path(__file__).resolve()}:coin",)),
            learn=dataclasses.replace(config.learn, gradient_checkpointing=args.checkpointing),
            diagnose=dataclasses.replace(config.diagnose, every=0),
            evaluate=dataclasses.replace(config.evaluate, problems=1),
        )
    )


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """The embedded model's tokenizer, which knows digits, with as many tokens more as the model needs."""
    described = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    known = described["model"]["vocab"]
    known |= {f"<{number}>": number for number in range(len(known), vocabulary)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(described), encoding="utf-8")
        return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<eos>", pad_token="<pad>")


def model_of(size: str, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> LanguageModel:
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=32_768, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device(device):
        torch.manual_seed(0)
        module = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    model = LanguageModel(without_dropout(module).eval())
    model.check()
    return model


def parts_of(config: Config, size: str) -> Parts:
    device, tokenizer = device_of(config), tokenizer_of(SIZES[size]["vocab_size"])
    model = model_of(size, tokenizer, device)
    if config.lora.rank:
        model = with_adapter(model, config.lora, "random", config.run.seed)
    codec = TokenizerCodec(tokenizer, (tokenizer.eos_token_id,), model.max_length)
    own = OwnCode()
    task = build_task(config, codec, model.max_length, own.rewards, own.task)
    if config.learn.memory == "lean":
        model, compute = model.in_bfloat16(), torch.bfloat16
    else:
        compute = compute_of(config, model, model.device, task, print)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return Parts(config, model, codec, task, compute, own, print)


class Profiled:
    """A learner whose update of one batch is profiled."""

    def __init__(self, learner: Any, version: int) -> None:
        self._learner = learner
        self._version = version

    def update(self, batch: Any) -> Any:
        if self._learner.version != self._version:
            return self._learner.update(batch)
        done: list[Any] = []
        show_kernels(lambda: done.append(self._learner.update(batch)), 1, "update")
        return done[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


def train(parts: Parts, folder: Path, profile: bool) -> list[dict[str, float]]:
    store, sink = Ledger(folder / "store.db"), Printing(folder / METRICS)
    loop = build_loop(parts, store, sink, folder)
    # Whole responses to an evaluation, one at a time, would take longer than a step.
    short = dataclasses.replace(loop.evaluator.sampling, max_tokens=min(8, parts.config.sampling.max_tokens))
    loop = dataclasses.replace(loop, evaluator=dataclasses.replace(loop.evaluator, sampling=short))
    if profile:
        loop = dataclasses.replace(loop, learner=Profiled(loop.learner, parts.config.run.steps - 1))
    with torch_for(parts.model, parts.config.run), rare_garbage_collection():
        loop.run(SyncState())
    loop.supply.close()
    store.close()
    sink.close()
    return sink.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--memory", choices=("full", "lean"), default="full")
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA adapters; 0 trains all weights")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="optimiser steps; the first one compiles")
    parser.add_argument("--micro_batch", type=int, help="most tokens of one forward and backward pass")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--gpu_memory", type=float, help="most GPU memory, in GiB")
    parser.add_argument("--no_compile", dest="compile", action="store_false")
    parser.add_argument(
        "--profile", action="store_true", help="print the time of each kind of kernel of the last update"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    started = time.perf_counter()
    parts = parts_of(config_of(args), args.size)
    trained = parts.model.parameters()
    total = sum(parameter.numel() for parameter in parts.model.module.parameters())
    before = describe(trained.items())
    print(f"{total:,} weights, made and checked in {time.perf_counter() - started:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = train(parts, Path(folder), args.profile)
    changed = sum(old != new for old, new in zip(before, describe(trained.items()), strict=True))
    whole = [after["moment"] - earlier["moment"] for earlier, after in itertools.pairwise(rows)]
    steps = [row for row in rows if "time/learn" in row]
    warm = steps[1:] or steps  # the first one compiles
    speed = sum(row["tokens/generated"] for row in warm) / sum(row["time/decode"] for row in warm)
    print(f"{changed} of {len(before)} trained tensors changed")
    print(
        f"{args.size}, memory {args.memory}, LoRA rank {args.lora}: step {median(whole) if whole else 0:.2f} s (median "
        f"without the first), decoding {speed:,.0f} tokens/s, peak {peak() / 2**30:.1f} GiB "
        f"({peak() / total:.1f} bytes per weight)"
    )
    if not changed:
        raise SystemExit("no weight changed")


if __name__ == "__main__":
    main()
