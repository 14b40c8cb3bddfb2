"""`solera bench`: the real command, what it prints and writes, and what it refuses."""

import json
import subprocess
import sys

import pytest

from solera.bench.bench import _share_of_peak, _spread
from solera.bench.options import BenchOptions, check
from solera.errors import SoleraError

SMALL = ["--prompts", "4", "--group", "2", "--steps", "3", "--device", "cpu"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "solera.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_parts_add_up_to_no_more_than_the_whole(tmp_path):
    path = tmp_path / "steps.json"
    done = bench(*SMALL, "--v", "1", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "Solera, v = 1" in done.stdout
    assert "107,904 parameters" in done.stdout
    rounds = json.loads(path.read_text())["rounds"]
    assert {name: len(several) for name, several in rounds.items()} == {"Solera, v = 1": 1, "Solera, v = 2": 1}
    for several in rounds.values():
        for one in several:
            assert len(one["steps"]) == 3
            for step in one["steps"]:
                parts = step["time/generate"] + step["time/learn"] + step["time/sync"]
                assert 0 < step["time/decode"] < step["time/generate"]
                assert parts < step["whole"]
    synced = [step["time/sync"] > 0 for step in rounds["Solera, v = 2"][0]["steps"]]
    assert synced in ([True, False, True], [False, True, False])


def test_problems_of_a_file(tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(40)))
    done = bench(*SMALL, "--problems", str(problems), "--unmasked")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"group": 1}, "--group is 1; it must be at least 2"),
        ({"steps": 0}, "--steps is 0; it must be at least 1"),
        ({"v": ()}, "--v is"),
        ({"problems": "nowhere.jsonl"}, "--problems: nowhere.jsonl: no such file"),
        ({"trl_step": "nowhere.py"}, "--trl_step: nowhere.py: no such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, said):
    with pytest.raises(SoleraError, match=said):
        check(BenchOptions(**wrong))


def test_share_of_the_peak_and_spread():
    step = {"tokens/computed": 1e5, "time/learn": 0.5}
    one = {"device": "NVIDIA H200", "parameters": 135e6, "steps": [step]}
    assert _share_of_peak([one]) == "20.5%"  # 6 · 135e6 · 1e5 / 0.5 / 790e12
    assert _share_of_peak([{**one, "device": "cpu"}]) == ""
    assert _spread([1.0, 2.0, 3.0]) == "2.0000 (1.0000–3.0000)"
