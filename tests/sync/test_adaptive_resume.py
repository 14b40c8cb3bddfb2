"""The adaptive rule's readings are kept in a checkpoint: a resumed run syncs where it would have synced."""

import json
import shutil
from pathlib import Path

import pytest

from solera.config import parse
from solera.folder.checkpoint import read_checkpoint
from solera.report.sinks import read_metrics
from solera.run import running

RUN = """
run = {{ root = "{root}", name = "whole", steps = 16, device = "cpu" }}
collect = {{ prompts = 6, group_size = 6 }}
learn = {{ lr = 4e-4, warmup = 0 }}
sync = {{ rule = "adaptive", metric = "kl", set_point = 0.03, v_max = 12 }}
diagnose = {{ probe_prompts = 6 }}
evaluate = {{ every = 0, problems = 20 }}
checkpoint = {{ every = 1, keep = 50 }}
report = {{ tensorboard = false, progress = false, page = false }}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return running.train(parse(RUN.format(root=tmp_path_factory.mktemp("whole")), "test")).folder


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def cut_back(whole: Path, to: Path, step: int) -> Path:
    """The run as if it had been killed after that batch, with the checkpoint's state file."""
    shutil.copytree(whole, to)
    shutil.rmtree(to / "model")
    for path in (to / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return to / "checkpoints" / f"step-{step:06d}" / "state.json"


def test_a_resumed_run_syncs_where_it_would_have_synced(whole, tmp_path):
    rows = rows_of(whole)
    within = [k for k in range(2, 15) if k - rows[k]["sync/version"] >= 2]  # two readings or more were taken already
    assert within
    for step in (within[0], within[-1]):
        folder = tmp_path / f"from-{step}"
        state = json.loads(cut_back(whole, folder, step).read_text())
        assert [batches for batches, _ in state["sync"]["readings"]] == list(
            range(1, step - state["sync"]["engine_version"] + 1)
        )
        assert rows_of(running.resume(folder).folder) == rows


def test_a_checkpoint_without_readings_goes_on(whole, tmp_path):
    """As written before readings were kept: the rule takes the growth it expects until new readings come."""
    file = cut_back(whole, tmp_path / "old", 7)
    state = json.loads(file.read_text())
    del state["sync"]["readings"], state["uses"]
    file.write_text(json.dumps(state))
    (file.parent / "digests.json").unlink()
    assert read_checkpoint(file.parent).state.sync.readings == ()
    rows = rows_of(running.resume(tmp_path / "old").folder)
    assert rows[:8] == rows_of(whole)[:8] and len(rows) == 17
