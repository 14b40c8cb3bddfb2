"""The section of docs/results.md about SmolLM2 says what the published runs say, also of an unfinished sweep."""

import json
import runpy
from pathlib import Path

import pytest

from solera.config import dump
from solera.errors import SoleraError
from solera.sweep.file import read_plan

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, which finds no published run but those of the test."""
    functions = runpy.run_path(str(ROOT / "scripts" / "write_smollm2_doc.py"))
    monkeypatch.setitem(functions["published"].__globals__, "PUBLISHED", tmp_path)
    return functions


def plan_of(name: str):
    return read_plan(ROOT / "recipes" / f"sweep_{name}.toml", to_run=False)


def record(folder: Path, plan, name: str, accuracies: list[float], **pace: float) -> None:
    (run,) = (run for run in plan.runs() if run.name == name)
    every = run.config.run.steps // (len(accuracies) - 1)
    measures = {
        "final": accuracies[-1], "best": max(accuracies), "mean": sum(accuracies) / len(accuracies), "wobble": None,
        "seconds": 2.0, "clipped": None, "syncs": 100.0,
    }  # fmt: skip
    content = {
        "run": name, "measures": measures, "curve": [[every * i, a] for i, a in enumerate(accuracies)],
        "pace": {"seconds": 200.0, "steps": run.config.run.steps, "batch": 2.0, "active": 4.0, **pace},
        "config": dump(run.config),
    }  # fmt: skip
    (folder / plan.name).mkdir(exist_ok=True)
    (folder / plan.name / f"{name}.json").write_text(json.dumps(content))


def test_the_page_is_made_from_the_published_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    script = runpy.run_path(str(ROOT / "scripts" / "write_smollm2_doc.py"))
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    made, sweeps = script["blocks"]()
    assert script["written"](text, made) == text
    assert all((ROOT / "docs" / "figures" / f"{name}.png").exists() for name in sweeps)


def test_intervals_by_hand(script, tmp_path):
    """Finals 5, 6, 7 % and 4, 6 %: s² = (1 + 0 + 1 + 1 + 1) / (2 + 1), and t with ν = 3 is 3.1824 (printed tables)."""
    plan = plan_of("gsm8k_second")
    for seed, final in enumerate((0.05, 0.06, 0.07)):
        record(tmp_path, plan, f"on_policy-s{seed}", [0.03, 0.04, final])
    for seed, final in enumerate((0.04, 0.06)):
        record(tmp_path, plan, f"v10_centre_one-s{seed}", [0.03, 0.05, final])
    results = script["published"](plan)
    assert script["pooled"](results) == (pytest.approx((4 / 3) ** 0.5 / 100), 3)
    # 6 ± 3.1824·1.1547/√3 and 6 ± 3.1824·1.1547·√(4/3)
    assert script["ranges"](results, plan.cells[0]) == ("3.9 to 8.1", "1.8 to 10.2")
    told = script["tables"](results)
    assert (
        "| `on_policy` | 6.0 | 3.9 to 8.1 | 1.8 to 10.2 | 5.0, 6.0, 7.0 | 4.3 | 0.0 | – | 100 | 2.00 (4.0 runs) |"
        in told
    )
    # −1 ± 3.1824·1.1547·√(1/3 + 1/2); t = 0.9487; p = 1 − 2/π·(θ + sin θ·cos θ) with tan θ = t/√3, for ν = 3
    assert "| `v10_centre_one` | `on_policy` | -1.0 | -4.4 to +2.4 | 0/1 of 2 | 0.413 |" in told
    assert "5 of 15 runs of 100 batches are finished; they took 4 GPU minutes." in script["state"](results)  # 5 · 50 s


def test_an_unfinished_sweep_says_what_is_missing(script, tmp_path):
    plan = plan_of("gsm8k_dual_clip")
    for run in plan.runs()[:-2]:
        record(tmp_path, plan, run.name, [0.03, 0.05, 0.04])
    told = script["block"](script["published"](plan))
    assert "10 of 12 runs of 60 batches are finished" in told
    assert "Missing: `grpo_dual_clip+v20-s2`, `grpo_dual_clip+never-s2`.\n" in told
    assert told.count("| 1.0 | – |") == 4  # each fell from 5 to 4 %


def test_a_run_that_was_resumed_counts_as_a_whole(script, tmp_path):
    plan = plan_of("gsm8k_second")
    record(tmp_path, plan, "on_policy-s0", [0.03, 0.05], seconds=60.0, steps=25, active=2.0)
    assert script["gpu_minutes"](script["published"](plan)) == pytest.approx(60 / 25 * 100 / 2 / 60)
    record(tmp_path, plan, "on_policy-s0", [0.03, 0.05], seconds=9.0, steps=0, batch=0.0)  # only an evaluation was left
    assert script["gpu_minutes"](script["published"](plan)) == pytest.approx(2.0 * 100 / 4 / 60)
    assert "| – |\n" in script["tables"](script["published"](plan))
    assert script["ranges"](script["published"](plan), plan.cells[0]) == ("–", "–")  # one run has no spread


def test_a_run_of_another_config_is_refused(script, tmp_path):
    plan = plan_of("gsm8k_second")
    record(tmp_path, plan, "on_policy-s0", [0.03, 0.05])
    file = tmp_path / "gsm8k_second" / "on_policy-s0.json"
    file.write_text(file.read_text().replace("lr = 2e-05", "lr = 3e-05"))
    with pytest.raises(SoleraError, match=r"was created with learn\.lr = 3e-05"):
        script["published"](plan)


def test_the_stop_rule(script, tmp_path):
    stopped_at = script["stopped_at"]
    assert stopped_at([(0, 0.1), (50, 0.3), (100, 0.2), (150, 0.3), (200, 0.4)]) == 50
    assert stopped_at([(0, 0.1), (50, 0.3), (100, 0.2), (150, 0.31), (200, 0.3), (250, 0.3)]) == 150
    assert stopped_at([(0, 0.1), (50, 0.3), (100, 0.2)]) is None  # one more evaluation is needed
    plan = plan_of("gsm8k_long")
    for seed in range(3):
        record(tmp_path, plan, f"v10-s{seed}", [0.03, 0.05, 0.07, 0.06, 0.06 + 0.01 * seed])
    assert "`v10` stopped improving after 200 batches, at 7.0 %" in script["block"](script["published"](plan))


def test_verdicts_and_evaluations_are_published(script, tmp_path):
    made = tmp_path / "sweeps"
    made.mkdir()
    (made / "verdicts_smollm2_2.jsonl").write_text("{}\n")
    estimates = {"pass@1 greedy": {"value": 0.0925, "low": 0.08, "high": 0.11}, "reward greedy": {"value": 1.0}}
    model = {"model": "sweeps/gsm8k_long/runs/v10-s0", "estimates": estimates, "greedy": {"problems": [1, 2, 3]}}
    (made / "gsm8k_long_eval.json").write_text(json.dumps({"settings": {"seed": 0}, "models": [model]}))
    script["collected_beside"](made)
    assert (tmp_path / "verdicts_smollm2_2.jsonl").read_text() == "{}\n"
    assert "problems" not in (tmp_path / "gsm8k_long_eval.json").read_text()
    assert script["evaluation"]().splitlines() == [
        "| model | pass@1 greedy (%) |", "| --- | ---: |", "| `v10-s0` | 9.2 (8.0 to 11.0) |",
    ]  # fmt: skip


def test_a_sweep_gets_a_subsection_with_its_first_run(script):
    page = f"# Results\n\n{script['END']}\n## Others\n"
    once = script["written"](page, {"countdown": ("Countdown", "a table\n")})
    assert "### Countdown\n\n<!-- smollm2: countdown -->\na table\n<!-- end smollm2: countdown -->\n" in once
    again = script["written"](
        once.replace("### Countdown\n", "### Countdown\n\nBy hand.\n"), {"countdown": ("", "new\n")}
    )
    assert "By hand." in again
    assert "new" in again
    assert "a table" not in again
