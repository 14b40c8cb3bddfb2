#!/usr/bin/env python3
"""Time a whole training step of Solera and of TRL on the same work, interleaved, on a CPU.

    .venv/bin/pip install -c constraints.txt -e '.[bench]'
    .venv/bin/python benchmarks/step_vs_trl.py --trl-step PATH/trl_step.py

Both train the embedded model on-policy (v=1, i=1) on the same sums, 32 prompts × 8 responses of up to 8 tokens, GRPO
without KL, one optimiser step a batch, learning rate 1e-6 (so that both keep meeting the same mixture of easy and hard
problems), the same number of threads. Each round starts both in a process of its own, in turn. Ours is the time from
one step's log to the next: generation, grading, store, update, sync, metrics. TRL's is the time from the end of one
step to the end of the next, taken from outside; its own `step_time`, which leaves its optimiser step out, is printed
beside.
Prints medians with quartiles and writes one JSON line.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

EMBEDDED = Path(__file__).resolve().parents[1] / "solera" / "models" / "embedded"


def ours(args: argparse.Namespace) -> list[float]:
    """Seconds a step, in this process."""
    import torch

    from solera.build import build_loop, build_task, resolved
    from solera.config import (
        CheckpointConfig,
        CollectConfig,
        Config,
        EvaluateConfig,
        LearnConfig,
        RunConfig,
        SamplingConfig,
        SyncConfig,
    )
    from solera.models import loading
    from solera.process import rare_garbage_collection, torch_for
    from solera.report.sinks import JsonLines
    from solera.store.ledger import Ledger
    from solera.sync.rules import SyncState

    config = resolved(
        Config(
            run=RunConfig(steps=args.steps, threads=args.threads, device="cpu"),
            sampling=SamplingConfig(max_tokens=args.new_tokens),
            collect=CollectConfig(prompts=args.prompts, group_size=args.group),
            learn=LearnConfig(lr=1e-6, warmup=0),
            sync=SyncConfig(period=1),
            evaluate=EvaluateConfig(every=0),
            checkpoint=CheckpointConfig(every=0),
        )
    )
    marks: list[float] = []

    class Marking(JsonLines):
        def log(self, step, metrics):
            super().log(step, metrics)
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        model, codec = loading.load("embedded", torch.device("cpu"))
        store = Ledger(Path(folder) / "store.db")
        sink = Marking(Path(folder) / "metrics.jsonl")
        task = build_task(config, codec)
        loop = build_loop(config, model, codec, task, store, sink, torch.float32, Path(folder))
        with torch_for(model, args.threads), rare_garbage_collection():
            loop.run(SyncState())
        store.close()
        sink.close()
    return [b - a for a, b in itertools.pairwise(marks)]  # neither warm-up nor the last evaluation


def write_prompts(path: Path) -> None:
    from solera.tasks.arithmetic import draw_pair

    rng = Random(0)
    pairs = [draw_pair(rng, 2, held_out=False) for _ in range(4000)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


WHOLE_STEPS = """
import json, runpy, sys, time
from transformers.trainer_callback import DefaultFlowCallback as Flow
marks, on_step_end = [], Flow.on_step_end
def marking(self, *arguments, **keywords):
    marks.append(time.perf_counter())
    return on_step_end(self, *arguments, **keywords)
Flow.on_step_end = marking
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps({"marks": marks}))
"""


def trl(args: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds a whole step, and by TRL's own count, in a process of its own."""
    command = [
        args.trl_python, "-c", WHOLE_STEPS, args.trl_step.resolve(), EMBEDDED, folder / "prompts.jsonl",
        "--device", "cpu",
        "--prompts", args.prompts, "--group", args.group, "--new-tokens", args.new_tokens,
        "--micro-batch", args.prompts * args.group, "--steps", args.steps,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(map(str, command), capture_output=True, text=True, env=environment, cwd=folder, check=False)
    if done.returncode:
        sys.exit(f"TRL's step failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"marks', '{"step_time'))]
    marks = next(row["marks"] for row in rows if "marks" in row)
    whole = [b - a for a, b in itertools.pairwise(marks)]
    return whole[1:], [row["step_time"] for row in rows if "step_time" in row][2:]


def in_a_process(args: argparse.Namespace) -> list[float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    command = [sys.executable, __file__, *sys.argv[1:], "--only-ours"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"our step failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(seconds: list[float]) -> str:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle * 1e3:6.1f} ms  ({low * 1e3:.1f} – {high * 1e3:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-step", type=Path, required=True, help="the script that times TRL's step")
    parser.add_argument("--trl-python", default=sys.executable, help="a Python that has trl")
    for name, default in (
        ("prompts", 32),
        ("group", 8),
        ("new-tokens", 8),
        ("steps", 40),
        ("threads", 1),
        ("rounds", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only-ours", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_ours:
        print(json.dumps(ours(args)))
        return
    own, peer, counted, ratios = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder) / "prompts.jsonl")
        for number in range(args.rounds):
            mine, (theirs, by_its_count) = in_a_process(args), trl(args, Path(folder))
            own += mine
            peer += theirs
            counted += by_its_count
            ratios.append(statistics.median(mine) / statistics.median(theirs))
            print(f"round {number + 1}: ratio {ratios[-1]:.3f}", flush=True)
    print(f"Solera  {spread(own)}\nTRL     {spread(peer)}, {spread(counted).split('(')[0].strip()} by its own count\n"
          f"ratio   {statistics.median(ratios):.3f}  ({min(ratios):.3f} – {max(ratios):.3f})")  # fmt: skip
    print(json.dumps({
        "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": args.threads,
        "prompts": args.prompts, "group": args.group, "new_tokens": args.new_tokens, "solera": statistics.median(own),
        "trl": statistics.median(peer), "ratio": statistics.median(ratios),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
