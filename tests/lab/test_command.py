"""`solera lab` in a subprocess, as a user types it."""

import json
from pathlib import Path

import pytest

from tests.command import solera


def test_quick_shows_and_writes_everything(tmp_path: Path):
    names = ["reinforce", "grpo", "red_drop", "m2po", "opmd_kimi", "sft"]
    done = solera("lab", "--quick", "--objectives", *names, "--out", "lab", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "lab/lab.json").read_text())
    assert set(found) == {"bias", "groups", "fixed_point", "amplification"}
    assert {row["objective"] for row in found["bias"]["rows"]} == set(names)
    for name in found:
        assert (tmp_path / "lab" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    reinforce = next(row for row in found["fixed_point"] if row["objective"] == "reinforce" and row["data"] == "never")
    assert reinforce["way"] == pytest.approx([-0.174, 0.132, 0.042])
    assert reinforce["end"][1] > 0.9
    assert reinforce["end"][2] < 0.1
    assert "-.174 .132 .042" in done.stdout


def test_one_experiment_with_options(tmp_path: Path):
    arguments = ["--objectives", "rloo", "grpo", "--lags", "0", "2", "--group_size", "3", "--clip", "0.1", "--quick"]
    done = solera("lab", "bias", *arguments, "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "here/lab.json").read_text())["bias"]["rows"]
    assert [(row["objective"], row["lag"]) for row in rows] == [("rloo", 0), ("rloo", 2), ("grpo", 0), ("grpo", 2)]
    # On-policy, leave-one-out points along ∇J.
    assert rows[0]["cosine"] == pytest.approx(1, abs=1e-12)
    again = solera("lab", "bias", *arguments, "--out", "again[1]", cwd=tmp_path, fresh=True)
    assert again.returncode == 0
    assert "again[1]/bias.png" in again.stdout
    assert (tmp_path / "again[1]/lab.json").read_bytes() == (tmp_path / "here/lab.json").read_bytes()


def test_a_quick_look_and_a_single_experiment_leave_other_results_alone(tmp_path: Path):
    """The options make the full experiments short enough."""
    folder = tmp_path / "runs" / "lab"
    assert solera("lab", "bias", "--objectives", "grpo", "--lags", "0", cwd=tmp_path).returncode == 0
    full = json.loads((folder / "lab.json").read_text())
    assert solera("lab", "bias", "groups", "--quick", "--objectives", "grpo", cwd=tmp_path).returncode == 0
    assert json.loads((folder / "lab.json").read_text()) == full
    assert json.loads((tmp_path / "runs" / "lab-quick" / "lab.json").read_text()).keys() == {"bias", "groups"}
    assert solera("lab", "groups", "--quick", "--out", "runs/lab", cwd=tmp_path).returncode == 0
    found = json.loads((folder / "lab.json").read_text())
    assert found.keys() == {"bias", "groups"} and found["bias"] == full["bias"]


@pytest.mark.parametrize("content", [b'{"bias": {"rows": [', b"[]", b"\xff"])
def test_numbers_that_cannot_be_read_are_not_written_over(tmp_path, content):
    (tmp_path / "lab.json").write_bytes(content)
    done = solera("lab", "groups", "--quick", "--out", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("solera: lab.json was not written by the lab")
    assert [path.name for path in tmp_path.iterdir()] == ["lab.json"]
    assert (tmp_path / "lab.json").read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["biass"], "biass"),
        (["--objectives", "grop"], "did you mean grpo"),
        (["--group_size", "1"], "--group_size is 1; it must be at least 2"),
        (["--lags", "-1"], "--lags"),
        (["--clip", "0"], "--clip is 0.0; it must be above 0"),
    ],
)
def test_mistakes_in_one_line(arguments: list[str], says: str, tmp_path: Path):
    done = solera("lab", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_names_the_experiments_with_one_of_them_too(tmp_path):
    shown = [solera("lab", *names, "--help", cwd=tmp_path).stdout for names in ([], ["bias"])]
    assert shown[0] == shown[1]
    assert "`fixed_point`:" in shown[0]
