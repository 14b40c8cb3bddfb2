"""Sync rules against the schedule's formula, and the proof against deliveries that went wrong."""

from dataclasses import replace

import pytest

from solera.config import SyncConfig
from solera.errors import SoleraError
from solera.records import Manifest, TensorSpec
from solera.sync.proof import check
from solera.sync.rules import SyncState, sync_rule


def engine_versions(config: SyncConfig, steps: int) -> list[int]:
    """Version the engine holds while batch k is written, k = 0 … steps−1."""
    rule, state, held = sync_rule(config), SyncState(), []
    for k in range(steps):
        if state.due:
            state = state.done(k)
        held.append(state.engine_version)
        state = rule(state, k + 1)
    return held


@pytest.mark.parametrize("v", [1, 2, 3, 10, 20])
def test_every_v_batches(v):
    assert engine_versions(SyncConfig(period=v), 45) == [v * (k // v) for k in range(45)]


def test_never():
    assert engine_versions(SyncConfig(rule="never"), 45) == [0] * 45


A, B = TensorSpec("a", (2, 3), "torch.float32"), TensorSpec("b", (4,), "torch.float32")
SENT = Manifest("run", 7, (A, B))


def test_what_was_sent_passes():
    check(SENT, Manifest("run", 7, (B, A)))


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (replace(SENT, version=6), "still holds version 6"),
        (replace(SENT, lineage="other"), "weights of another run"),
        (replace(SENT, tensors=(A,)), "tensor b did not arrive"),
        (replace(SENT, tensors=(A, replace(B, shape=(5,)))), "tensor b arrived as"),
        (replace(SENT, tensors=(A, replace(B, dtype="torch.float16"))), "tensor b arrived as"),
        (replace(SENT, tensors=(A, B, replace(B, name="c"))), "were not sent: c"),
    ],
)
def test_what_differs_stops_the_run_and_is_named(held, says):
    with pytest.raises(SoleraError, match="sync of version 7: .*" + says):
        check(SENT, held)
