"""Run and time our steps in this process."""

import dataclasses
import itertools
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from solera.bench.options import BenchOptions, Mode
from solera.config import (
    CheckpointConfig,
    CollectConfig,
    Config,
    EvaluateConfig,
    LearnConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    SyncConfig,
    TaskConfig,
    with_settings,
)
from solera.folder.paths import METRICS
from solera.report.sinks import JsonLines
from solera.run.build import build_loop
from solera.run.parts import load_parts, resolved
from solera.run.process import rare_garbage_collection, torch_for
from solera.store.database import place_of
from solera.store.ledger import Ledger
from solera.sync.rules import SyncState

PARTS = ("time/decode", "time/generate", "time/learn", "time/sync", "time/proof", "time/diagnose", "time/store")


def configure(options: BenchOptions, v: int, mode: Mode) -> Config:
    """On-policy GRPO (except for `v`) without KL, at a learning rate that hardly changes the model, and with the
    settings that the options add."""
    task = TaskConfig() if options.problems is None else TaskConfig("jsonl", path=options.problems)
    learn = LearnConfig(lr=1e-6, warmup=0, memory=options.memory, graphs=options.graphs)
    if options.micro_batch is not None:
        learn = dataclasses.replace(learn, micro_batch_tokens=options.micro_batch)
    config = Config(
        run=RunConfig(
            steps=options.steps + options.warm_up + 1,
            threads=options.threads,
            device=options.device,
            gpu_memory=options.gpu_memory,
        ),
        model=ModelConfig(options.model, compute=options.compute, compile=options.compile),
        lora=LoraConfig(options.lora),
        task=task,
        reward=RewardConfig(functions=("number",)) if options.problems else RewardConfig(),
        sampling=SamplingConfig(max_tokens=options.new_tokens),
        collect=CollectConfig(
            prompts=options.prompts,
            group_size=options.group,
            mode="lock_step" if mode == "lock_step" else "stream",
            overlap=options.overlap,
        ),
        objective=ObjectiveConfig("grpo", zero_variance_mask=False if options.unmasked else None),
        learn=learn,
        sync=SyncConfig(period=v, in_flight="drain" if mode == "drain" else SyncConfig.in_flight),
        evaluate=EvaluateConfig(every=0, problems=8),
        checkpoint=CheckpointConfig(every=0),
    )
    return resolved(with_settings(config, options.settings, "--settings"))


class Watching(JsonLines):
    """Keeps the metrics of every step, the time of its parts, and the moment it was logged."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        decode, proof = (metrics.get(f"time/{name}", 0.0) for name in ("generate/decode", "sync/proof"))
        parts = {"time/decode": decode, "time/proof": proof, "moment": time.perf_counter()}
        self.rows.append({**metrics, **parts})


def measure(options: BenchOptions, v: int, mode: Mode) -> dict[str, Any]:
    """Return the parts of each step in seconds, and what was computed."""
    config = configure(options, v, mode)
    gpu = options.device != "cpu" and torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        parts = load_parts(config)
        store, sink = Ledger(place_of(config.store.url, Path(folder))), Watching(Path(folder) / METRICS)
        loop = build_loop(parts, store, sink, Path(folder))
        with torch_for(parts.model, config.run), rare_garbage_collection():
            loop.run(SyncState())
        loop.supply.close()
        store.close()
        sink.close()
    counted = list(itertools.pairwise(sink.rows))[options.warm_up - 1 : options.steps + options.warm_up - 1]
    steps = [{**dict.fromkeys(PARTS, 0.0), **row, "whole": row["moment"] - before["moment"]} for before, row in counted]
    return {
        "v": v,
        "steps": steps,
        "parameters": sum(p.numel() for p in parts.model.module.parameters()),
        "lora": options.lora,
        "peak": torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "types": _types(options, str(parts.compute).removeprefix("torch.")),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
    }


def _types(options: BenchOptions, compute: str) -> str:
    if options.memory == "lean":
        return "weights bfloat16 (one copy), moments in 8 bits"
    return f"masters float32, weights and arithmetic {compute}"
