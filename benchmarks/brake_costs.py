"""Measure what sync proof and update diagnosis cost, as shares of a step.

python benchmarks/brake_costs.py MODEL [--problems FILE] [--prompts 64] [--new_tokens 256] [--steps 12]

The benchmark judges every batch, to get enough timings of each part. It then prints shares for the default
`diagnose.every`. The time of a step excludes diagnosis. The proof does not include copying the weights; at v = 1 they
are shared.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from solera.bench.options import BenchOptions
from solera.bench.ours import Watching, configure
from solera.config import Config, DiagnoseConfig, override
from solera.engines import in_process
from solera.models.digest import describe, locate
from solera.run.build import build_loop
from solera.run.parts import load_parts
from solera.run.process import rare_garbage_collection, torch_for
from solera.store.database import place_of
from solera.store.ledger import Ledger
from solera.sync.rules import SyncState
from solera.training import loop as looping
from solera.training.delivery import CANARY_SHARE
from solera.training.loop import Loop

Spent = dict[str, list[float]]


def timed(spent: Spent, name: str, function):
    def call(*args):
        wait()
        start = time.perf_counter()
        found = function(*args)
        wait()
        spent[name].append(time.perf_counter() - start)
        return found

    return call


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def watch(loop: Loop) -> Spent:
    spent: Spent = defaultdict(list)
    looping.off_policy_metrics = timed(spent, "figures of the batch", looping.off_policy_metrics)
    in_process.describe = timed(spent, "proof, engine", describe)
    in_process.locate = timed(spent, "proof, engine", locate)
    loop.learner.manifest = timed(spent, "proof, learner", loop.learner.manifest)
    loop.delivery._prove = timed(spent, "canary", loop.delivery._prove)
    for part in ("renew", "score", "judge"):
        setattr(loop.probe, part, timed(spent, part, getattr(loop.probe, part)))
    return spent


def measure(config: Config) -> tuple[list[dict[str, float]], Spent]:
    with tempfile.TemporaryDirectory() as folder:
        parts = load_parts(config)
        for name, dtype in (("masters", None), ("engine's", parts.compute)):
            weights = [(key, p.detach().to(dtype or p.dtype)) for key, p in parts.model.parameters().items()]
            several: Spent = defaultdict(list)
            for _ in range(20):
                timed(several, "describe", describe)(weights)
            size = sum(p.nbytes for _, p in weights) / 2**20
            print(f"digests alone, {name} {size:.0f} MiB: {1e3 * median(several['describe']):.2f} ms", flush=True)
        store, sink = Ledger(place_of(config.store.url, Path(folder))), Watching(Path(folder) / "metrics.jsonl")
        loop = build_loop(parts, store, sink, Path(folder))
        spent = watch(loop)
        with torch_for(parts.model, config.run), rare_garbage_collection():
            loop.run(SyncState())
            for _ in range(3):
                loop.learner.version += 1
                loop.delivery._next_canary = -1.0  # with shared weights, canaries run only now and then
                loop.delivery.deliver()
        store.close()
    return sink.rows, spent


def report(v: int, rows: list[dict[str, float]], spent: Spent) -> None:
    counted = list(pairwise(rows[:-1]))[BenchOptions.warm_up :]
    step = median(row["moment"] - before["moment"] - row["time/diagnose"] for before, row in counted)
    cost = {name: median(seconds[1:]) for name, seconds in spent.items()}
    every = DiagnoseConfig().every
    proof = cost["proof, learner"] + cost["proof, engine"]
    probe = (cost["renew"] + 2 * cost["judge"]) / every  # scored once before the update and once after
    print(f"v = {v}: one step {step:.3f} s;", {name: f"{1e3 * value:.2f} ms" for name, value in cost.items()})
    canaries = CANARY_SHARE if v == 1 else cost["canary"] / v / step
    print(
        f"v = {v}: digests take {proof / v / step:.3%} of a step ({proof / step:.2%} of a step with a sync), "
        f"canaries {canaries:.2%}; diagnosis takes "
        f"{cost['figures of the batch'] / step:.2%} for the metrics of a batch and {probe / step:.2%} for the probe",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--problems", help="as for `solera bench`")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    for v in (1, 10):
        options = BenchOptions(
            model=given.model, problems=given.problems, prompts=given.prompts, new_tokens=given.new_tokens, threads=8,
            steps=max(given.steps, 2 * v),
        )  # fmt: skip
        # no overlap: otherwise the time of one part would include that of another
        config = override(override(configure(options, v, "lock_step"), "diagnose", every=1), "collect", overlap=False)
        report(v, *measure(override(config, "evaluate", problems=100)))
