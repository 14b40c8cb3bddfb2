#!/usr/bin/env python3
"""What a sync to a vLLM server costs: `python benchmarks/vllm_sync.py [--urls URL] [--rounds 3]`.

Trains the embedded model with responses from a vLLM server, for v = 1, 2, 5, 10 batches between two syncs, in lock-step
and streaming (`collect.max_age = 2 * v`). Without `--urls` the script starts one server and uses it for all runs. The
runs take turns, so that other work on the machine affects all of them. The first batches of each run are left out.
Prints medians over all rounds as a Markdown table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from solera.engines.vllm.launch import launch
from solera.models.source import EMBEDDED

PERIODS, MODES = (1, 2, 5, 10), ("lock_step", "stream")
PARTS = ("time/sync", "time/diagnose", "time/generate", "time/learn", "time/store")
WARM = 10
"""Steps at the beginning that do not count. It is a multiple of every period."""


def measure(root: Path, url: str, mode: str, period: int, args: argparse.Namespace) -> dict[str, float]:
    name = f"{mode}-{period}"
    command = [
        sys.executable, "-m", "solera.cli", "train", "--engine", "vllm", "--engine.urls", url, "--run.root", str(root),
        "--run.name", name, "--run.steps", str(WARM + args.steps), "--run.threads", "1", "--run.device", "cpu",
        "--collect.prompts", str(args.prompts), "--collect.mode", mode, "--sync.period", str(period),
        "--diagnose.every", "0", "--evaluate.every", "0", "--evaluate.problems", "8", "--checkpoint.every", "0",
        "--report.tensorboard", "False", "--report.progress", "False",
        *(("--collect.max_age", str(2 * period)) if mode == "stream" else ()),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/learn" in row][WARM:]
    seconds = sum(row.get(part, 0.0) for row in rows for part in PARTS)
    syncs = [row for row in rows if "time/sync/proof" in row]
    return {
        "steps/s": len(rows) / seconds,
        "tokens/s": sum(row["tokens/generated"] for row in rows) / seconds,
        "sync": median(row["time/sync"] for row in syncs),
        "proof": median(row["time/sync/proof"] for row in syncs),
        "share": sum(row["time/sync"] for row in syncs) / seconds,
    }


def table(found: dict[tuple[str, int], list[dict[str, float]]]) -> str:
    middle = {key: {name: median(row[name] for row in rows) for name in rows[0]} for key, rows in found.items()}
    first = middle["lock_step", 1]["steps/s"]
    lines = [
        "| v | mode | steps/s | against v = 1, lock-step | tokens/s | one sync | of it proof | share of the time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (mode, period), row in middle.items():
        sync, proof = (f"{1000 * row[name]:.0f} ms" for name in ("sync", "proof"))
        lines.append(
            f"| {period} | {mode.replace('_', '-')} | {row['steps/s']:.2f} | {row['steps/s'] / first:.2f} | "
            f"{row['tokens/s']:,.0f} | {sync} | {proof} | {row['share']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--urls", help="a server that runs already")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a batch; 8 responses each")
    args = parser.parse_args()
    found: dict[tuple[str, int], list[dict[str, float]]] = {(mode, v): [] for v in PERIODS for mode in MODES}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        if args.urls is None:
            server = launch(
                str(EMBEDDED), dtype="float32", max_length=64, on_gpu=False, gpu_memory=None, args=(), folder=root,
                passing=root / "passing", say=lambda said: print(said, file=sys.stderr, flush=True),
            )  # fmt: skip
            stack.callback(server.close)
        for number in range(args.rounds):
            for (mode, period), rows in found.items():
                rows.append(measure(root / str(number), args.urls or server.url, mode, period, args))
                print(number, mode, period, rows[-1], file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
