"""A run folder from before a field existed goes on as it began."""

import json
import re
import shutil
from pathlib import Path

import pytest

from solera.cli import main
from solera.config import Config, ObjectiveConfig, dump, load_resolved
from solera.errors import SoleraError
from solera.objectives.table import resolve_config
from solera.sweep.file import read_plan
from solera.sweep.state import refuse_changed
from tests.command import solera
from tests.test_resume import outcome

FIELD = "objective.whiten_epsilon"


def forget(folder: Path) -> None:
    """Make the folder what a version without the field would have written."""
    file = folder / "config.toml"
    text, lines = re.subn(r"(# )?whiten_epsilon .*\n", "", file.read_text(encoding="utf-8"))
    assert lines == 1
    file.write_text(text, encoding="utf-8")
    begun = json.loads((folder / "beginning.json").read_text(encoding="utf-8"))
    del begun["settings"][FIELD]
    (folder / "beginning.json").write_text(json.dumps(begun), encoding="utf-8")


def train(root: Path, name: str, *options: str) -> Path:
    status = main([
        "train", "--run.root", str(root), "--run.name", name, "--run.steps", "4", "--run.device", "cpu",
        "--collect.prompts", "6", "--collect.group_size", "4", "--sync.period", "3", "--checkpoint.every", "2",
        "--checkpoint.keep", "9", "--evaluate.problems", "8", "--diagnose.probe_prompts", "0", "--objective", "grpo",
        *options,
    ])  # fmt: skip
    assert status == 0
    return root / name


def test_a_run_from_before_whiten_epsilon_goes_on_with_1e_4(tmp_path):
    whole = train(tmp_path, "whole", "--objective.whiten_epsilon", "1e-4")
    older = tmp_path / "older" / "whole"
    shutil.copytree(whole, older)
    forget(older)
    shutil.rmtree(older / "model")
    shutil.rmtree(older / "checkpoints" / "step-000004")
    done = solera("train", "--resume", str(older))
    assert done.returncode == 0, done.stderr
    assert "has changed since the run started" not in done.stdout + done.stderr
    (rows, weights), (expected_rows, expected) = outcome(older), outcome(whole)
    assert rows == expected_rows
    assert all(weights[name].equal(expected[name]) for name in expected)
    now = outcome(train(tmp_path, "now"))[1]
    assert not all(now[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("objective", "mentioned", "expected"),
    [
        (ObjectiveConfig("grpo"), True, 1e-8),
        (ObjectiveConfig("grpo", whiten_epsilon=1e-6), True, 1e-6),
        (ObjectiveConfig("grpo"), False, 1e-4),
        (ObjectiveConfig("dr_grpo", advantage="whiten"), False, 1e-4),
        (ObjectiveConfig("dr_grpo"), False, None),
        (ObjectiveConfig("grpo", advantage="whiten_bessel"), False, None),
        (ObjectiveConfig("sft"), False, None),
    ],
)
def test_what_a_file_without_the_field_means(tmp_path, objective, mentioned, expected):
    text = dump(resolve_config(Config(objective=objective)))
    file = tmp_path / "config.toml"
    file.write_text(text if mentioned else re.sub(r".*whiten_epsilon.*\n", "", text), encoding="utf-8")
    assert resolve_config(load_resolved(file)).objective.whiten_epsilon == expected


def test_a_sweep_does_not_compare_runs_of_either_value(tmp_path):
    file = tmp_path / "sweep.toml"
    grid = '[sweep]\nroot = "{}"\nseeds = 1\n[objective]\nname = "grpo"\n{}[axis.sync]\nv1 = {{ sync.period = 1 }}\n'
    file.write_text(grid.format(tmp_path, ""), encoding="utf-8")
    (run,) = read_plan(file).runs()
    run.folder.mkdir(parents=True)
    text = re.sub(r".*whiten_epsilon.*\n", "", dump(run.config))
    (run.folder / "config.toml").write_text(text, encoding="utf-8")
    with pytest.raises(
        SoleraError, match=r"was created with objective\.whiten_epsilon = 0\.0001, but \S+ now has 1e-08"
    ):
        refuse_changed(read_plan(file))
    file.write_text(grid.format(tmp_path, "whiten_epsilon = 1e-4\n"), encoding="utf-8")
    refuse_changed(read_plan(file))
