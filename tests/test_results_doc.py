"""docs/results.md says what the published runs say, and its intervals are what it says they are."""

import runpy
from pathlib import Path

import pytest

from solera.sweep.file import read_plan

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "write_results_doc.py"))


def test_the_tables_are_made_from_the_published_runs(script, monkeypatch):
    monkeypatch.chdir(ROOT)  # sweep_mixed.toml names its files from there
    sweeps = {plan.name: script["published"](plan) for plan in script["plans"]()}
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert script["written"](text, sweeps) == text
    assert all(f"<!-- tables: {name} -->" in text for name in sweeps if name != "pilot")


def test_an_interval_by_hand(script):
    """0.50, 0.51, 0.52: s = 0.01, and t with ν = 2 at 99.9 % is 31.599 (printed tables)."""
    low, high = script["again"]({0: 0.50, 1: 0.51, 2: 0.52})
    assert high - 0.51 == pytest.approx(31.599 * 0.01 * (2 / 3) ** 0.5, rel=1e-4)
    assert low == pytest.approx(0.51 - (high - 0.51))
    assert script["again"]({0: 0.3, 1: 0.3}) == pytest.approx((0.29, 0.31))  # never narrower than a point
    assert script["again"]({0: 0.1, 1: 0.9}) == (0, 1)


def test_the_further_pairs_share_their_circumstances(script):
    pairs = script["_pairs"](read_plan(ROOT / "recipes" / "sweep_clip_or_lr.toml"))
    names = [(ours.name, theirs.name) for ours, theirs in pairs]
    assert ("wide+3e-4+never", "narrow+1e-3+never") in names
    assert len(names) == len(set(names))
    assert all(ours.split("+")[2] == theirs.split("+")[2] for ours, theirs in names)
