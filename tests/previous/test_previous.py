"""Runs that an earlier commit wrote and left killed (`make.py`) continue: to the bit on the machine that made them."""

import json
import math
import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from solera.run.running import resume
from tests.previous.make import HERE, KINDS, machine, rows

TOLERANCE = 5e-3
"""On another processor: sums differ in their last bits, and steps carry that on."""
WIDER_NOW = ("improvement/low", "improvement/high", "improvement/state")
"""The interval of the probe's estimate fits rare changes since then. The estimate itself is the same."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_of_an_earlier_commit_ends_as_it_would_have(kind, tmp_path, monkeypatch):
    with tarfile.open(HERE / f"{kind}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / kind)
    resume(Path("run"))
    tolerance = 0.0 if machine() == json.loads((HERE / "machine.json").read_text()) else TOLERANCE
    expected_rows = json.loads(Path("expected/rows.json").read_text())
    made_rows = rows(Path("run"))
    assert len(made_rows) == len(expected_rows) == 13
    for made, expected in zip(made_rows, expected_rows, strict=True):
        assert expected.keys() <= made.keys()
        for name, value in expected.items():
            if name in WIDER_NOW:
                continue
            same = (
                made[name] == value if tolerance == 0 else math.isclose(made[name], value, rel_tol=5e-2, abs_tol=5e-3)
            )
            assert same, (made["step"], name, value, made[name])
    expected_weights = load_file("expected/model.safetensors")
    made_weights = load_file("run/model/model.safetensors")
    assert made_weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        assert (made_weights[name] - weight).abs().max() <= tolerance, name
