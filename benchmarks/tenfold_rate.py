"""Does a sync rule keep the divergence at its set-point when the learning rate is raised tenfold during a run?

python benchmarks/tenfold_rate.py adaptive 1 10 --seeds 0 1 2 3 --processes 2

RULE is `adaptive` or a sync period v. Model and task are the demo's. The first 20 batches use the demo's learning rate
and bring the model to where it learns fastest. The next 160 use a tenth of it, and the last 60 the full rate again. For
every sync the script prints the divergence just before it (`tv_token` on the probe) as a share of the set-point. Each
(rule, seed) pair runs in its own process.
"""

import argparse
import dataclasses
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

import torch

from solera.config import Config, DiagnoseConfig, EvaluateConfig, LearnConfig, RunConfig, SyncConfig
from solera.models import loading
from solera.run.build import build_loop
from solera.run.parts import Parts, resolved
from solera.run.process import torch_for
from solera.run.running import restore
from solera.run.task import build_task
from solera.store.ledger import Ledger
from solera.training.loop import Loop

LOWERED, RAISED, STEPS, RATE = 20, 180, 240, 3e-4
METRIC, SET_POINT = "tv_token", 0.06


class ChangesRate:
    """Keeps the metrics, and divides the learning rate by ten from batch LOWERED to batch RAISED."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.loop: Loop | None = None

    def log(self, step, metrics) -> None:
        self.rows.append(dict(metrics))
        rate = RATE / 10 if LOWERED <= step + 1 < RAISED else RATE
        self.loop.learner.config = dataclasses.replace(self.loop.learner.config, lr=rate)

    def close(self) -> None: ...


def run(rule: str, seed: int) -> list[dict[str, float]]:
    adaptive = SyncConfig(rule="adaptive", metric=METRIC, set_point=SET_POINT, v_max=STEPS)
    config = resolved(
        Config(
            run=RunConfig(steps=STEPS, seed=seed, device="cpu"), learn=LearnConfig(lr=RATE),
            sync=adaptive if rule == "adaptive" else SyncConfig(period=int(rule)),
            evaluate=EvaluateConfig(every=0), diagnose=DiagnoseConfig(probe_prompts=32, every=1),
        )
    )  # fmt: skip
    model, codec = loading.load(config.model.path, torch.device("cpu"))
    sink = ChangesRate()
    with tempfile.TemporaryDirectory() as folder, torch_for(model, config.run):
        store = Ledger(Path(folder) / "store.db")
        parts = Parts(config, model, codec, build_task(config, codec), torch.float32)
        sink.loop = build_loop(parts, store, sink, Path(folder))
        sink.loop.run(restore(sink.loop, None))
        store.close()
    return sink.rows[:-1]


Shares = tuple[list[float], list[float]]


def at_syncs(rule: str, seed: int) -> Shares:
    """Return divergence / set-point just before each sync, at the low rate and after it was raised."""
    rows = run(rule, seed)
    synced = [k for k in range(LOWERED, len(rows) - 1) if rows[k + 1]["sync/version"] == k + 1]
    shares = [(k, rows[k][f"probe/{METRIC}"] / SET_POINT) for k in synced]
    found = [x for k, x in shares if k < RAISED], [x for k, x in shares if k >= RAISED]
    print(rule, seed, *([round(share, 2) for share in part] for part in found), file=sys.stderr, flush=True)
    return found


def said(shares: list[float]) -> str:
    if not shares:
        return "no sync"
    inside = sum(0.7 <= share <= 1.3 for share in shares)
    return f"{min(shares):.2f} to {max(shares):.2f} ({inside} of {len(shares)} within ±30 %)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="+", help="adaptive, or a sync period")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        running = [[pool.submit(at_syncs, rule, seed) for seed in given.seeds] for rule in given.rules]
        for rule, several in zip(given.rules, running, strict=True):
            parts = zip(*(future.result() for future in several), strict=True)
            print(f"| {rule} | {' | '.join(said(list(chain(*part))) for part in parts)} |", flush=True)
