"""The learning rate is raised tenfold in mid-run: does a sync rule keep the divergence where it was set?

python benchmarks/tenfold_rate.py SEEDS RULE...     RULE: adaptive, or a period v; such as 0,1,2,3 adaptive 1 10 50

The demo's model and task at 1e-4, and at 1e-3 from batch 200 of 260 on. At every sync, the divergence (`tv_token`, on
the probe, after the last batch before it) as a share of the set-point: what the rule let it grow to.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import torch

from solera.build import build_loop, build_task, resolved
from solera.config import Config, DiagnoseConfig, EvaluateConfig, LearnConfig, RunConfig, SyncConfig
from solera.loop import Loop
from solera.models import loading
from solera.process import torch_for
from solera.running import restore
from solera.store.ledger import Ledger

BEFORE, AFTER, RATE, SET_POINT = 200, 60, 1e-4, 0.04
METRIC = "tv_token"


class RaisesRate:
    """Keeps the metrics, and raises the rate after batch BEFORE."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.loop: Loop | None = None

    def log(self, step, metrics) -> None:
        self.rows.append(dict(metrics))
        if step == BEFORE - 1:
            learner = self.loop.learner
            learner.config = dataclasses.replace(learner.config, lr=10 * RATE)

    def close(self) -> None: ...


def run(rule: str, seed: int) -> list[dict[str, float]]:
    adaptive = SyncConfig(rule="adaptive", metric=METRIC, set_point=SET_POINT, v_max=BEFORE + AFTER)
    config = resolved(
        Config(
            run=RunConfig(steps=BEFORE + AFTER, seed=seed, device="cpu"), learn=LearnConfig(lr=RATE),
            sync=adaptive if rule == "adaptive" else SyncConfig(period=int(rule)),
            evaluate=EvaluateConfig(every=0), diagnose=DiagnoseConfig(probe_prompts=32, every=1),
        )
    )  # fmt: skip
    model, codec = loading.load(config.model.path, torch.device("cpu"))
    sink = RaisesRate()
    with tempfile.TemporaryDirectory() as folder, torch_for(model, 1):
        store = Ledger(Path(folder) / "store.db")
        sink.loop = build_loop(
            config, model, codec, build_task(config, codec), store, sink, torch.float32, Path(folder)
        )
        sink.loop.run(restore(sink.loop, None))
        store.close()
    return sink.rows[:-1]


def at_syncs(rows: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Divergence over set-point just before each sync, at the first rate and at the second."""
    synced = [k for k in range(len(rows) - 1) if rows[k + 1]["sync/version"] == k + 1]
    shares = [(k, rows[k][f"probe/{METRIC}"] / SET_POINT) for k in synced]
    return [x for k, x in shares if k < BEFORE], [x for k, x in shares if k >= BEFORE]


def said(shares: list[float]) -> str:
    if not shares:
        return "no sync"
    inside = sum(0.7 <= share <= 1.3 for share in shares)
    return f"{min(shares):.2f} to {max(shares):.2f} ({inside} of {len(shares)} within ±30 %)"


if __name__ == "__main__":
    for rule in sys.argv[2:]:
        before, after = [], []
        for seed in sys.argv[1].split(","):
            rows = at_syncs(run(rule, int(seed)))
            before, after = before + rows[0], after + rows[1]
        print(f"| {rule} | {said(before)} | {said(after)} |", flush=True)
