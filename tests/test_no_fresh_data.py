"""Old rollouts, another model's text, and rewards that came late and were revised: enough to learn from."""

import json

from tests.command import ROOT, run_script


def test_learning_with_no_fresh_data(tmp_path):
    script = ROOT / "benchmarks" / "no_fresh_data.py"
    done = run_script(script, "--steps", 40, "--root", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    revised, flipped = found["revised"], found["flipped"]
    assert revised["after"] > revised["before"] + 0.2
    assert flipped["after"] < revised["after"] - 0.1  # the revised rewards of one source changed the outcome
    for name, outcome in found.items():
        assert outcome["generated"] == 0 and outcome["youngest"] >= 64
        shares = [outcome[f"origin_weight/{origin}"] for origin in ("self", "model:teacher", "human")]
        assert min(shares) > 0.02 and abs(sum(shares) - 1) < 0.01
        page = (tmp_path / "runs" / name / "report.html").read_text()
        assert "Whose text moves the policy?" in page and "origin_weight/human" in page
