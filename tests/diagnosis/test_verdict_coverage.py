"""The study of the verdicts' coverage: its intervals by hand, and the script on the embedded model."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from tests.command import run_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT, REPORT = BENCHMARKS / "verdict_coverage.py", BENCHMARKS / "verdict_report.py"
INTERVALS, TOLD = (runpy.run_path(str(REPORT))[name] for name in ("intervals", "report"))


def test_two_more_prompts_widen_the_interval():
    """Gains 3, 1, 1, −1: mean 1, Σd² = 8. With ±3 around the mean as further deviations: Σd² = 8 + 2·9 = 26."""
    low, high = INTERVALS(np.array([3.0, 1.0, 1.0, -1.0]))["two more prompts"]
    error = (26 / 3 / 4) ** 0.5
    assert (low, high) == pytest.approx((1 - 3.1824 * error, 1 + 3.1824 * error), abs=1e-3)


def update(truth: float, *centres: float, covered: bool = True) -> dict[str, object]:
    """An update with a probe per centre: 64 gains, half of them 0.01 above it and half below, so that the interval of
    their mean is the centre ± 2·0.01/√63."""
    gains = [[centre + 0.01 * (-1) ** i for i in range(64)] for centre in centres]
    probes = [{"error": 0.01 / 63**0.5, "covered": covered, "gain": centre} for centre in centres]
    return {"truth": truth, "truth_error": 1e-4, "age": 0, "lr": 1e-3, "gains": gains, "probes": probes}


def test_the_report_counts_by_hand():
    """The half-width is 0.0025. Inside: 0.001 around 0, both at 0.01; outside: 0.01 around 0, 0.01 around −0.01."""
    told = list(TOLD([update(0.0, 0.001, 0.01), update(0.01, 0.01, 0.01, -0.01), update(-0.01, -0.01, covered=False)]))
    assert told[0] == "3 updates (0 others changed nothing), 6 probes"
    normal = next(line for line in told if line.startswith("| normal"))
    assert normal.startswith("| normal | 66.7 % (")  # 4 of 6
    assert "| 60.0 % (50.0 to 66.7) | 20.0 % | 20.0 % |" in normal  # 3 of 5 trusted; alone the updates have 1/2 and 2/3
    assert "| certified | 3 | 2 | 0 | 1 | 100.0 % (100.0 to 100.0) |" in told
    assert "| harmful | 1 | 0 | 1 | 0 | 0.0 % (0.0 to 0.0) |" in told


def test_the_script_measures_continues_and_reports(tmp_path):
    (tmp_path / "small.toml").write_text(
        'collect = { prompts = 4, group_size = 4 }\nobjective = { name = "grpo" }\nrun = { device = "cpu" }\n'
    )
    command = (
        "small.toml", "--out", "found.jsonl", "--lr", "1e-3", "--segments", "1", "--probes", "2",
        "--problems", "70", "--precision", "0.3", "--device", "cpu",
    )  # fmt: skip
    done = run_script(SCRIPT, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [(line["segment"], line["band"]) for line in lines] == [(s, b) for s in (0, 1) for b in range(4)]
    for line in lines:
        assert np.array(line["gains"]).shape == (2, 64)
        means = [np.mean(gains) for gains in line["gains"]]
        assert means == pytest.approx([probe["gain"] for probe in line["probes"]], abs=1e-5)
        assert line["truth_responses"] % (4 * 70) == 0
    again = run_script(SCRIPT, *command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 8  # nothing was missing
    kept = [line for line in lines if (line["segment"], line["band"]) not in {(0, 2), (1, 0)}]
    (tmp_path / "found.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    rest = run_script(SCRIPT, *command, cwd=tmp_path)
    assert rest.stdout.count("segment") == 2, rest.stderr  # only what was missing is measured
    added = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()][6:]
    assert [(line["segment"], line["band"]) for line in added] == [(0, 2), (1, 0)]
    told = run_script(REPORT, "found.jsonl", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "| one more prompt on each side |" in told.stdout


def test_the_truth_has_no_bias():
    """E_m[2(w − 1)/(w + 1)·r] = J(π) − J(π_k), summed over three answers."""
    before, after, reward = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.2, 0.3]), np.array([0.0, 1.0, 1.0])
    w, m = after / before, (before + after) / 2
    h = 2 * np.tanh(np.log(w) / 2)
    assert (m * h * reward).sum() == pytest.approx(0.2)  # 0.5 − 0.3
    assert (m * h).sum() == pytest.approx(0)
