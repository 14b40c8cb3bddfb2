#!/usr/bin/env python3
"""Train on a vLLM server with several seeds: `python benchmarks/vllm_seeds.py --out FILE.jsonl [--seeds 5]`.

Runs the demo once per seed. With `--compare` it runs each seed twice, in lock-step and streaming, both on-policy
(`sync.period = 1`, `collect.max_age = 0`), and prints a 95 % interval of the difference in accuracy. All runs share one
server: `--url`, or one that the script starts. Each run adds a line to FILE; a run that has one is not repeated.
Further arguments go to `solera train`.

A sync counts as proven if its row of the metrics has the time of a proof and no fault.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from solera.engines.vllm.launch import launch
from solera.models.source import EMBEDDED
from solera.sweep.student import paired

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo.toml"
DEMO, LOCK_STEP, STREAM = "demo", "lock_step", "stream"
SETTINGS = {
    DEMO: (),
    LOCK_STEP: ("--sync.period", "1"),
    STREAM: ("--sync.period", "1", "--collect.mode", "stream", "--collect.max_age", "0"),
}
Result = dict[str, Any]


def train(url: str, mode: str, seed: int, further: list[str], root: str) -> Result:
    start, name = time.perf_counter(), f"{mode}-{seed}"
    command = [
        sys.executable, "-m", "solera.cli", "train", str(RECIPE), "--engine", "vllm", "--engine.urls", url,
        "--run.seed", str(seed), "--run.root", root, "--run.name", name, "--run.threads", "1", "--run.device", "cpu",
        "--report.tensorboard", "False", "--report.progress", "False", *SETTINGS[mode], *further,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    seconds = time.perf_counter() - start
    return {"mode": mode, "seed": seed, "further": further, **read(Path(root) / name), "seconds": round(seconds)}


def read(run: Path) -> Result:
    """Accuracy, syncs and ages, from the metrics of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/pass@1" in row]
    return {
        "before": round(100 * evaluated[0]["eval/pass@1"], 2),
        "after": round(100 * evaluated[-1]["eval/pass@1"], 2),
        "version": evaluated[-1]["eval/version"],
        "syncs": max(row.get("sync/count", 0) for row in rows),
        "proven": sum(row.get("time/sync/proof", 0) > 0 and row["sync/faults"] == 0 for row in rows),
        "mismatch": max(row.get("mismatch/logp", 0) for row in rows),
        "oldest": max(row.get("age/max", 0) for row in rows),
    }


def table(results: list[Result]) -> str:
    lines = ["| mode | seed | accuracy | of version | syncs proven | largest mismatch/logp | oldest response | time |"]
    lines.append("| --- " * 8 + "|")
    for row in results:
        lines.append(
            f"| {row['mode']} | {row['seed']} | {row['before']:.1f} → {row['after']:.1f} % | {row['version']:.0f} | "
            f"{row['proven']} of {row['syncs']:.0f} | {row['mismatch']:.1e} | {row['oldest']:.0f} | "
            f"{row['seconds']} s |"
        )
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """Mean and standard deviation of each mode, and the difference between streaming and lock-step."""
    after = {mode: {row["seed"]: row["after"] for row in results if row["mode"] == mode} for mode in SETTINGS}
    lines = [
        f"{mode}: mean {mean(found.values()):.2f} %, standard deviation {stdev(found.values()):.2f}, {len(found)} seeds"
        for mode, found in after.items()
        if len(found) > 1
    ]
    both = after[LOCK_STEP].keys() & after[STREAM].keys()
    if len(both) > 1:
        found = paired([after[STREAM][seed] - after[LOCK_STEP][seed] for seed in both])
        within = "no spread" if found.low is None else f"95 % interval {found.low:+.2f} to {found.high:+.2f}"
        lines.append(f"streaming minus lock-step: {found.mean:+.2f} points, {within}, {found.seeds} seeds")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--url", help="a server that runs already")
    args, further = parser.parse_known_args()
    args.out.touch()
    results = [json.loads(line) for line in args.out.read_text().splitlines()]
    results = [row for row in results if row["further"] == further]
    have = {(row["mode"], row["seed"]) for row in results}
    modes = (LOCK_STEP, STREAM) if args.compare else (DEMO,)
    missing = [(mode, seed) for seed in range(args.seeds) for mode in modes if (mode, seed) not in have]
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        url = args.url or (serve(Path(root), stack) if missing else "")
        for mode, seed in missing:
            results.append(train(url, mode, seed, further, root))
            with args.out.open("a") as file:
                print(json.dumps(results[-1]), file=file)
            print(results[-1], file=sys.stderr, flush=True)
    results = [row for row in results if row["mode"] in modes]
    print(table(results), summary(results), sep="\n\n")


def serve(folder: Path, stack: ExitStack) -> str:
    server = launch(
        str(EMBEDDED), dtype="float32", max_length=64, on_gpu=False, gpu_memory=None, args=(), folder=folder,
        passing=folder / "passing", say=lambda said: print(said, file=sys.stderr, flush=True),
    )  # fmt: skip
    stack.callback(server.close)
    return server.url


if __name__ == "__main__":
    main()
