"""Folders of runs made by hand."""

import json
from pathlib import Path

import numpy as np

from solera.records import Reward, Rollout, Sequence, Span, Use
from solera.store.ledger import Ledger


def write_run(folder: Path, rows: list[dict[str, float]], config: str = '[task]\nname = "arithmetic"\n') -> Path:
    """The least that is a run's folder: metrics and a config."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(config)
    return folder


def rollout(key: str, reward: float, tokens: tuple[int, ...] = (5, 6), *rewards: Reward) -> Rollout:
    """One prompt token, then these tokens, written by version 0 of lineage `a`."""
    ids = np.array((4, *tokens), np.int32)
    sequence = Sequence(ids, (Span(1, len(ids), 0),), np.zeros(len(tokens), np.float32))
    return Rollout(key, (sequence,), (Reward(reward), *rewards), lineage="a")


def used(store: Ledger, step: int, rollouts: list[Rollout]) -> None:
    """Put them into the store, all learned from at this step."""
    ids = store.add(rollouts)
    store.record([Use(id_, step, step, 0.5) for id_ in ids])
