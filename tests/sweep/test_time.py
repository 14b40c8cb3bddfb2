"""A sweep with a time limit, continued elsewhere from small files; the gain of running side by side."""

import io
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console

from solera.config import dump
from solera.errors import SoleraError
from solera.sweep.clock import Estimates
from solera.sweep.file import read_plan
from solera.sweep.progress import Progressing
from solera.sweep.results import Gain, collect
from solera.sweep.state import refuse_changed
from tests.command import solera
from tests.sweep.test_machine import GRID
from tests.sweep.test_worker import log_batches, worker_of

SLOW = GRID.replace("steps = 4", "steps = 4000").replace("seeds = 2", "seeds = 1")


def record(plan, name: str, batch: float, active: float, seconds: float = 40.0) -> None:
    """The file of a finished run, written by hand."""
    (run,) = (run for run in plan.runs() if run.name == name)
    measures = {
        "final": 0.5, "best": 0.6, "mean": 0.4, "wobble": None, "seconds": 1.0, "clipped": None, "syncs": 4.0,
    }  # fmt: skip
    text = {
        "run": name, "measures": measures, "curve": [[0, 0.2], [4, 0.5]], "config": dump(run.config),
        "pace": {"seconds": seconds, "steps": 4, "batch": batch, "active": active},
    }  # fmt: skip
    folder = plan.folder / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(text))


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(GRID)
    return read_plan(Path("grid.toml"))


def test_the_limit_lets_the_active_runs_save_and_stop(tmp_path):
    (tmp_path / "grid.toml").write_text(SLOW)
    done = solera("sweep", "grid.toml", "--jobs", "1", "--minutes", "0.15", cwd=tmp_path)
    assert done.returncode == 130, done.stdout
    assert done.stderr == "solera: stopped; run the same command to continue\n"
    assert "0 of 2 runs finished; 1 stopped before the end; 1 not started." in done.stdout
    assert list((tmp_path / "sweeps/grid/runs/grpo-s0").glob("checkpoints/step-*"))


def test_the_small_files_are_enough_on_another_machine(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "grid.toml").write_text(GRID.replace("page = false", "page = true"))
    assert solera("sweep", "grid.toml", "--only", "algorithm=grpo", cwd=here).returncode == 0
    small = here / "sweeps/grid/results"
    assert sorted(path.name for path in small.iterdir()) == ["grpo-s0.json", "grpo-s1.json"]
    assert sum(path.stat().st_size for path in small.iterdir()) < 20_000
    shutil.copytree(small, there / "sweeps/grid/results")

    done = solera("sweep", "grid.toml", cwd=there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished  ") == 2  # the others were
    assert "4 of 4 runs finished." in done.stdout
    assert sorted(path.name for path in (there / "sweeps/grid/runs").iterdir()) == ["reinforce-s0", "reinforce-s1"]
    both = solera("sweep", "grid.toml", cwd=here)
    assert both.returncode == 0

    def accuracies(folder: Path) -> list[object]:
        runs = json.loads((folder / "sweeps/grid/results.json").read_text())["runs"]
        return [(run["cell"], run["seed"], run["curve"], run["measures"]["final"]) for run in runs]

    assert accuracies(here) == accuracies(there)
    page = (there / "sweeps/grid/report.md").read_text()
    assert "[reinforce-s0](runs/reinforce-s0/report.html)" in page
    assert "(runs/grpo-s0/report.html)" not in page  # it is not there


def test_a_finished_run_without_a_record_gets_one(tmp_path):
    """As after `solera train --resume` finished it: nobody knows how long it took."""
    (tmp_path / "grid.toml").write_text(GRID.replace("page = false", "page = true"))
    options = ("sweep", "grid.toml", "--only", "algorithm=grpo")
    assert solera(*options, cwd=tmp_path).returncode == 0
    records, run = tmp_path / "sweeps/grid/results", tmp_path / "sweeps/grid/runs/grpo-s0"
    before = {file: json.loads(file.read_text()) for file in records.iterdir()}
    (run / "report.html").unlink()
    for file in before:
        file.unlink()
    again = solera(*options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "finished  " not in again.stdout and "2 of 4 runs finished; 2 not started." in again.stdout
    assert {file: json.loads(file.read_text()) for file in records.iterdir()} == {
        file: {**was, "pace": None} for file, was in before.items()
    }
    assert (run / "report.html").exists()
    assert solera("sweep", "grid.toml", "--report", cwd=tmp_path).returncode == 0


def test_a_record_of_another_config_is_refused(plan):
    record(plan, "grpo-s0", 1.0, 1.0)
    refuse_changed(plan)
    Path("grid.toml").write_text(GRID.replace("group_size = 4", "group_size = 8"))
    with pytest.raises(SoleraError, match=r"grpo-s0.json was created with collect.group_size = 4, .* remove that file"):
        refuse_changed(read_plan(Path("grid.toml")))


@pytest.mark.parametrize("name", ["run", "measures", "curve", "pace", "config"])
@pytest.mark.parametrize("value", [None, 3, "text", [], {}, [[0, "high"]], {"final": 0.5}, {"seconds": 1}])
def test_a_record_with_a_damaged_part_is_named_in_one_line(plan, name, value):
    record(plan, "grpo-s0", 1.0, 1.0)
    file = plan.folder / "results/grpo-s0.json"
    made = json.loads(file.read_text())
    assert collect(plan).runs[0].state == "finished"
    file.write_text(json.dumps(made | {name: value}))
    if name == "run" or (name, value) in (("pace", None), ("curve", [])):  # nobody needs it, or it is not known
        collect(plan)
        return
    read = refuse_changed if name == "config" else collect
    with pytest.raises(SoleraError) as refused:
        read(plan)
    assert str(refused.value).startswith(f"{file}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", "null", "\udcff", "[" * 100_000])
def test_a_damaged_record_is_named_in_one_line(plan, text):
    file = plan.folder / "results/grpo-s0.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode(errors="surrogateescape"))
    for read in (refuse_changed, collect):
        with pytest.raises(
            SoleraError, match=r"grpo-s0\.json: the file is damaged: remove it, and the run starts again"
        ):
            read(plan)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"grpo-s0": 3}', "\udcff", "[" * 100_000])
def test_damaged_failures_are_named_in_one_line(plan, text):
    plan.folder.mkdir(parents=True)
    (plan.folder / "failures.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SoleraError, match=r"failures\.json: the file is damaged: remove it, and failed runs are tried"):
        collect(plan)


def test_a_finished_run_without_evaluations_is_named_in_one_line(plan):
    run = plan.runs()[0]
    log_batches(run, 4)
    (run.folder / "model").mkdir()
    with pytest.raises(
        SoleraError, match=r"grpo-s0: metrics\.jsonl holds no evaluation: remove this folder, and the run"
    ):
        collect(plan)


def test_a_record_may_come_from_a_run_without_cuda_graphs(plan):
    record(plan, "grpo-s0", 1.0, 1.0)
    Path("grid.toml").write_text(f"{GRID}\n[learn]\ngraphs = true\n")
    assert read_plan(Path("grid.toml")).cells[0].config.learn.graphs
    refuse_changed(read_plan(Path("grid.toml")))


def test_the_gain_counts_batches_of_all_active_runs(plan):
    record(plan, "grpo-s0", 1.0, 1.0)
    record(plan, "grpo-s1", 1.5, 3.0)
    record(plan, "reinforce-s0", 2.0, 2.5)
    # alone: 1 batch per second; side by side 3 runs make 1 / 1.5 batches per second each, 2 in total
    assert collect(plan).gains() == {"grpo": Gain(1.0, 1.5, 3.0, 2.0)}


def test_a_run_takes_as_long_as_others_of_its_cell_or_as_the_slowest_cell(plan):
    grpo, reinforce = plan.runs()[:2]
    assert Estimates.of(collect(plan)).seconds(grpo) == 0
    record(plan, "grpo-s1", 1.0, 1.0, seconds=40.0)
    estimates = Estimates.of(collect(plan))
    assert estimates.seconds(grpo) == estimates.seconds(reinforce) == 40.0
    record(plan, "reinforce-s1", 1.0, 1.0, seconds=90.0)
    estimates = Estimates.of(collect(plan))
    assert (estimates.seconds(grpo), estimates.seconds(reinforce)) == (40.0, 90.0)


def test_a_killed_run_takes_the_time_from_its_checkpoint_on(plan):
    """10 seconds per batch; the run logged 3 of 4 batches and saved after 2."""
    grpo = plan.runs()[0]
    record(plan, "grpo-s1", 1.0, 1.0, seconds=40.0)
    estimates = Estimates.of(collect(plan))
    log_batches(grpo, 3)
    assert estimates.seconds(grpo) == 40.0
    log_batches(grpo, 3, 1, 2)
    assert estimates.seconds(grpo) == 20.0


def test_an_active_run_tells_how_long_others_of_its_cell_take(plan):
    """It went on after 2 batches of 4 and made one in 7 seconds."""
    grpo, _, other = plan.runs()[:3]
    log_batches(grpo, 3, 2)
    worker = worker_of(grpo, plan.folder)
    worker.seconds = 7.0
    assert Estimates({}).seconds(other, [worker]) == 0
    log_batches(grpo, 2)
    log_batches(grpo, 4)
    worker.seconds = 14.0
    assert Estimates({}).seconds(other, [worker]) == 28.0


def test_no_run_starts_that_would_not_finish_in_time(plan):
    record(plan, "grpo-s0", 1.0, 1.0, seconds=4000.0)
    record(plan, "reinforce-s0", 1.0, 1.0, seconds=4.0)
    done = solera("sweep", "grid.toml", "--jobs", "2", "--minutes", "2", cwd=Path.cwd())
    assert done.returncode == 130
    assert "finished  reinforce-s1" in done.stdout
    assert "3 of 4 runs finished; 1 not started." in done.stdout
    assert not Path("sweeps/grid/runs/grpo-s1").exists()


def test_the_first_run_is_alone_to_measure_the_gain(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID.replace("seeds = 2", "seeds = 3"))
    done = solera("sweep", "grid.toml", "--jobs", "2", "--measure-gain", "--only", "algorithm=grpo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "sweeps/grid/results").iterdir())
    paces = [json.loads(file.read_text())["pace"] for file in files]
    assert [pace["steps"] for pace in paces] == [4, 4, 4]
    assert paces[0]["active"] == 1
    assert all(1 < pace["active"] <= 2 for pace in paces[1:])
    assert re.search(r"\d+ s of runs took \d+ s: 1\.\d\d side by side on average", done.stdout)
    assert re.search(r"gain of [12]\.\d active runs: \d+\.\d\d times the batches per second of", done.stdout)


def test_where_there_is_no_bar_a_line_comes_after_a_quiet_minute(plan, monkeypatch):
    now, said = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first, *others = plan.runs()
    with Progressing([first, *others], Console(file=said)) as progress:
        log_batches(first, 3)
        for second in (159, 160, 161, 219):
            now[0] = float(second)
            progress.update([first], others)
    # Four runs of 4 batches. Three batches took 60 s, so the other 13 take 260 s.
    assert said.getvalue() == "batches   3 of 16, 1 run active, 3 waiting  about 0:04:20 left\n"
