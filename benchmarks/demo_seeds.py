#!/usr/bin/env python3
"""Run the demo, or another recipe, on many seeds: `python benchmarks/demo_seeds.py [--seeds 20] [--recipe FILE]`.

Each seed runs the real command in its own process. For each one the script prints accuracy before and after training
and the seconds that the process took. The last lines give the mean, the standard deviation and the worst seed. Further
arguments go to `solera train`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo.toml"


def run(recipe: Path, seed: int, root: str, further: list[str]) -> tuple[float, float, float]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "solera.cli", "train", str(recipe), "--run.seed", str(seed), "--run.root", root]
    done = subprocess.run([*command, *further], capture_output=True, text=True, check=False)
    found = re.search(r"accuracy ([\d.]+)% before, ([\d.]+)% after", done.stdout)
    if done.returncode or not found:
        sys.exit(f"seed {seed} failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return float(found[1]), float(found[2]), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    args, further = parser.parse_known_args()
    results = {}
    with tempfile.TemporaryDirectory() as root:
        for seed in range(args.first, args.first + args.seeds):
            results[seed] = run(args.recipe, seed, root, further)
            print("seed {:3d}: {:.1f} % -> {:.1f} %  in {:.0f} s".format(seed, *results[seed]), flush=True)
    for place, when in enumerate(("before", "after")):
        values = [result[place] for result in results.values()]
        print(f"{when}: mean {mean(values):.1f} %, standard deviation {stdev(values) if len(values) > 1 else 0:.1f}")
    worst = min(results, key=lambda seed: results[seed][1])
    slowest = max(seconds for _, _, seconds in results.values())
    print(f"worst seed {worst}: {results[worst][1]:.1f} %; slowest run {slowest:.0f} s")


if __name__ == "__main__":
    main()
