"""Sync rules against the schedule's formula, and the proof against deliveries that went wrong."""

import math
import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from solera.config import SyncConfig
from solera.records import Manifest, TensorSpec
from solera.sync.proof import Canary, difference, tolerance
from solera.sync.rules import SyncState, sync_rule


def engine_versions(config: SyncConfig, steps: int) -> list[int]:
    """Version the engine holds while batch k is written, k = 0 … steps−1."""
    rule, state, held = sync_rule(config), SyncState(), []
    for k in range(steps):
        if state.due:
            state = state.done(k)
        held.append(state.engine_version)
        state = rule(state, k + 1, {})
    return held


@pytest.mark.parametrize("v", [1, 2, 3, 10, 20])
def test_every_v_batches(v):
    assert engine_versions(SyncConfig(period=v), 45) == [v * (k // v) for k in range(45)]


def test_never():
    assert engine_versions(SyncConfig(rule="never"), 45) == [0] * 45


def syncs(config: SyncConfig, readings: list[float | None]) -> list[int]:
    """Versions at which the engine was given weights, where batch k leaves the probe's divergence at `readings[k]`."""
    rule, state, found = sync_rule(config), SyncState(), []
    for k, reading in enumerate(readings):
        if state.due:
            state, found = state.done(k), [*found, k]
        state = rule(state, k + 1, {} if reading is None else {f"probe/{config.metric}": reading})
    return found


ADAPTIVE = SyncConfig(rule="adaptive", metric="tv_token", set_point=0.5, v_max=4)
CLIMB = [0.2, 0.4, 0.45, 0.3, 0.43, 0.44, 0.34, 0.1, 0.1, 0.1, 0.1, 0.1]
"""With n batches since the sync, due from .5/(1 + 1/2n): after one from .333, two .4, three .4286, four .444."""


@pytest.mark.parametrize(
    ("changed", "readings", "expected"),
    [
        ({}, CLIMB, [0, 2, 3, 5, 6, 7, 11]),  # .4 after 2; .45 after 1; .43 after 2; .44, .34 after 1; then v_max = 4
        ({"v_min": 2}, CLIMB, [0, 2, 5, 9]),  # .45 too soon, .3 not enough, .43 after 3; .34 not enough
        ({"set_point": 0.95}, CLIMB, [0, 4, 8]),
        ({"metric": "kl"}, CLIMB, [0, 2, 3, 5, 6, 7, 11]),
        ({"metric": "ess", "set_point": 0.8}, [0.9, 0.85, 0.86, 0.88, 0.81, 0.9, 0.84, 0.9], [0, 4, 5, 7]),
        ({}, [None] * 9, [0, 4, 8]),
    ],
)
def test_adaptive_by_scripted_readings(changed, readings, expected):
    assert syncs(replace(ADAPTIVE, **changed), readings) == expected


@pytest.mark.parametrize("growth", [0.004, 0.011, 0.02])
def test_readings_at_a_sync_lie_around_the_set_point(growth):
    """A divergence that grows by as much every batch, times a seeded ±20 %, and tenfold from batch 200 on."""
    rule, state, noise, at_sync, reading = sync_rule(replace(ADAPTIVE, v_max=500)), SyncState(), Random(3), [], 0.0
    for k in range(600):
        if state.due:
            at_sync.append((k, reading))
            state, reading = state.done(k), 0.0
        reading += (growth if k < 200 else 10 * growth) * noise.uniform(0.8, 1.2)
        state = rule(state, k + 1, {"probe/tv_token": reading})
    readings = [value for _, value in at_sync[1:]]
    assert len(readings) > 30 and all(0.35 <= value <= 0.65 for value in readings)
    assert 0.45 <= sum(readings) / len(readings) <= 0.55


@pytest.mark.parametrize(
    ("metric", "set_point", "readings", "coarse"),
    [
        ("tv_token", 0.1, [0.072, 0.128, 0.06], None),  # one batch is inside, or two of .06 would be
        ("tv_token", 0.1, [0.02, 0.05, 0.2, 0.08], None),  # a jump, but not after a single batch
        ("tv_token", 0.1, [0.12, 0.14, 0.15], "0.14"),  # said of the first, and once
        ("tv_token", 0.1, [0.08, 0.068], "0.068"),  # two would be .136
        ("ess", 0.9, [0.95, 0.91, 0.8], "0.8"),  # 1 − ess: half of the way, nine tenths, twice
        ("ess", 0.9, [0.92, 0.88], None),
    ],
)
def test_a_set_point_that_no_rule_can_keep_is_said_once(metric, set_point, readings, coarse):
    said: list[str] = []
    config = replace(ADAPTIVE, metric=metric, set_point=set_point, v_max=50)
    rule, state = sync_rule(config, said.append), SyncState()
    for k, reading in enumerate(readings):
        state = rule(state.done(k) if state.due else state, k + 1, {f"probe/{metric}": reading})
    assert [line.split(":")[0] for line in said] == [
        f"a single batch takes {metric} to {found}, so no rule can keep it within 30% of sync.set_point = {set_point}"
        for found in ([coarse] if coarse else [])
    ]


def test_adaptive_goes_by_its_own_metric_and_changes_nothing_but_due():
    rule, state = sync_rule(ADAPTIVE), SyncState(False, engine_version=7, count=3)
    assert rule(state, 8, {"probe/tv_sequence": 0.9, "divergence/tv_token": 0.9, "probe/tv_token": 0.1}) == state
    assert rule(state, 8, {"probe/tv_token": 0.9}) == replace(state, due=True)


A, B = TensorSpec("a", (2, 3), "torch.float32", 11), TensorSpec("b", (2, 3), "torch.float32", 12)
SENT, BEFORE = Manifest("run", 7, (A, B)), Manifest("run", 4, (A._replace(digest=1), B._replace(digest=2)))


def test_what_was_sent_passes():
    for before in (None, BEFORE):
        assert difference(SENT, Manifest("run", 7, (B, A)), before) is None
    assert difference(SENT, SENT, replace(SENT, version=4)) is None  # nothing was learned in between


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (BEFORE, "nothing arrived, the engine still holds version 4"),
        (replace(SENT, tensors=()), "nothing arrived"),
        (replace(SENT, version=6), "an older version arrived, the engine holds version 6"),
        (replace(SENT, version=8), "a later version arrived"),
        (replace(SENT, lineage="other"), "weights of another run"),
        (replace(BEFORE, version=7), "version 7 is stamped but not applied: all tensors are those of version 4"),
        (replace(SENT, tensors=(A,)), "tensor b did not arrive"),
        (replace(SENT, tensors=(A._replace(name="c"),)), r"tensor a \(and 1 more\) did not arrive"),
        (replace(SENT, tensors=(A, B._replace(shape=(5,)))), r"tensor b arrived as torch.float32 \[5\], sent as"),
        (replace(SENT, tensors=(A, B._replace(dtype="torch.float16"))), "tensor b arrived as torch.float16"),
        (replace(SENT, tensors=(A, B, B._replace(name="c"))), "was not sent: c"),
        (replace(SENT, tensors=(A, B._replace(digest=2))), "tensor b is stale: it still has its values of version 4"),
        (replace(SENT, tensors=(A._replace(digest=12), B._replace(digest=11))), "swapped: .* the values of b"),
        (replace(SENT, tensors=(A, B._replace(digest=13))), "tensor b arrived with other values"),
    ],
)
def test_what_differs_is_named(held, says):
    assert re.search(says, difference(SENT, held, BEFORE))


def canary(engine: list[float], learner: list[float], version: int = 7, lineage: str = "run") -> Canary:
    logps = (np.array(values, np.float32) for values in (engine, learner))
    return Canary(((3, 4),), frozenset({(lineage, version)}), *logps)


def test_a_canary_by_hand():
    """Differences .0625 and .1875: mean .125, exactly."""
    written = canary([-1.0, -2.0], [-1.0625, -1.8125])
    assert written.difference == 0.125
    assert written.fault(SENT, None, 0.125) is None
    assert "differ from the learner's by 0.12" in written.fault(SENT, None, 0.12)
    assert "differ" in canary([-1.0, math.nan], [-1.0, -2.0]).fault(SENT, None, 0.125)
    assert "version 6 of this run" in canary([-1.0], [-1.0], version=6).fault(SENT, None, 1.0)
    assert "of another run" in canary([-1.0], [-1.0], lineage="other").fault(SENT, None, 1.0)


def test_an_engine_that_repeats_itself_while_the_learner_moves_is_noticed():
    before = canary([-1.0, -2.0], [-1.0, -2.0])
    assert canary([-1.0, -2.0], [-1.0, -2.25]).fault(SENT, before, 2.4).startswith("log-probabilities did not change")
    assert canary([-1.0, -2.0], [-1.0, -2.25]).fault(SENT, before, 2.6) is None  # a tenth of it is more than the move
    assert canary([-1.0, -2.5], [-1.0, -2.25]).fault(SENT, before, 2.4) is None


def test_a_low_temperature_widens_the_tolerance():
    assert tolerance("torch.float32", 0.1) == pytest.approx(10 * tolerance("torch.float32", 1.0))
    assert tolerance("torch.float32", 2.0) == tolerance("torch.float32", 1.0) < tolerance("torch.bfloat16", 1.0)
