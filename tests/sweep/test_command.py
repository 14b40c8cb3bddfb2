"""`solera sweep` in a subprocess: stopped, killed, gone on with; a cell that fails beside others that do not."""

import json
import signal
import time
from pathlib import Path

import pytest

from solera.config import load, override
from solera.errors import SoleraError
from solera.report.sinks import read_metrics
from solera.run import running
from solera.sweep.state import locked
from tests.command import solera, start

SMALL = """
run = { steps = 8, device = "cpu" }
collect = { prompts = 4, group_size = 4 }
learn = { lr = 3e-3, warmup = 0 }
evaluate = { every = 4, problems = 10 }
report = { tensorboard = false, page = false }
"""
GRID = (
    SMALL
    + """
sweep = { seeds = 2 }
[axis.algorithm]
grpo = { objective.name = "grpo" }
reinforce = { objective.name = "reinforce" }
[axis.regime]
on_policy = { sync.period = 1 }
lag = { sync.period = 1, collect.offset = 2 }
"""
)
SWEEP = ("sweep", "grid.toml", "--jobs", "2")
PATIENCE = 300
"""Seconds after which something is wrong, however slow the machine is."""


def wait_until(happened) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def finished(folder: Path) -> list[Path]:
    return sorted(folder.glob("sweeps/grid/runs/*/model"))


def left(folder: Path) -> bool:
    """Whether every process of the sweep is gone."""
    try:
        with locked(folder / "sweeps" / "grid"):
            return True
    except SoleraError:
        return False


def numbers(folder: Path) -> list[dict[str, float]]:
    """What a run logged, its times aside."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def test_stopped_killed_and_gone_on_with(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID)
    runs = tmp_path / "sweeps" / "grid" / "runs"

    sweep = start(*SWEEP, cwd=tmp_path)
    wait_until(lambda: list(runs.glob("*/metrics.jsonl")))
    sweep.send_signal(signal.SIGINT)
    out, err = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 130, err
    assert err == "solera: stopped; run the same command to continue\n"
    assert "stopped   " in out
    assert left(tmp_path)
    begun = len(list(runs.iterdir()))
    assert 1 <= begun <= 3
    assert f"{begun} stopped before the end" in out or finished(tmp_path)
    assert (tmp_path / "sweeps/grid/report.html").exists()

    sweep = start(*SWEEP, cwd=tmp_path)
    wait_until(lambda: len(finished(tmp_path)) >= 2)
    sweep.kill()
    sweep.communicate(timeout=PATIENCE)
    wait_until(lambda: left(tmp_path))  # its runs notice, save and leave
    done = {model: model.stat().st_mtime_ns for model in finished(tmp_path)}
    assert 2 <= len(done) < 8

    sweep = start(*SWEEP, cwd=tmp_path)
    out, err = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 0, err
    assert "8 of 8 runs finished." in out
    assert out.count("finished  ") == 8 - len(done)
    assert all(model.stat().st_mtime_ns == before for model, before in done.items())
    told = json.loads((tmp_path / "sweeps/grid/results.json").read_text())
    assert [run["state"] for run in told["runs"]] == ["finished"] * 8
    assert {one["cell"]: one["against"] for one in told["comparisons"]} == {
        "reinforce+on_policy": "grpo+on_policy", "reinforce+lag": "grpo+lag",
    }  # fmt: skip

    for run in (
        "grpo+lag-s0",
        "reinforce+on_policy-s1",
    ):  # the first was stopped: each is the run that nobody disturbed
        config = override(load(runs / run / "config.toml"), "run", root=str(tmp_path / "alone"))
        assert numbers(running.train(config).folder) == numbers(runs / run)

    of_an_earlier_release = (runs / "grpo+lag-s0/config.toml").read_text().replace("overlap = false\n", "")
    (runs / "grpo+lag-s0/config.toml").write_text(of_an_earlier_release)
    assert "overlap" not in of_an_earlier_release
    assert solera("sweep", "grid.toml", "--report", cwd=tmp_path).returncode == 0

    (tmp_path / "grid.toml").write_text(GRID.replace("lr = 3e-3", "lr = 1e-3"))
    changed = solera("sweep", "grid.toml", cwd=tmp_path)
    assert changed.returncode == 2
    assert changed.stderr.count("\n") == 1
    assert "was created with learn.lr = 0.003" in changed.stderr


def test_a_cell_that_fails_holds_nobody_up(tmp_path):
    good = "def good(rollout, row):\n    return float(len(rollout.text) % 2)\n"
    (tmp_path / "rewards.py").write_text(good + "def bad(rollout, row):\n    return 1 / 0\n")
    (tmp_path / "grid.toml").write_text(
        SMALL
        + """
        sweep = { seeds = 2 }
        [axis.reward]
        good = { reward.functions = ["rewards.py:good"] }
        bad = { reward.functions = ["rewards.py:bad"] }
        """
    )
    sweep = start(*SWEEP, cwd=tmp_path)
    out, err = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1, err
    assert out.count("failed    bad-s") == 2
    assert out.count("division by zero") == 2
    assert "2 of 4 runs finished; 2 failed." in out
    assert [model.parent.name for model in finished(tmp_path)] == ["good-s0", "good-s1"]
    assert "division by zero" in (tmp_path / "sweeps/grid/report.html").read_text()

    again = solera("sweep", "grid.toml", cwd=tmp_path)
    assert again.returncode == 1
    assert "bad-s" not in again.stdout  # not tried again
    assert "2 of 4 runs finished; 2 failed." in again.stdout

    (tmp_path / "rewards.py").write_text(good + "def bad(rollout, row):\n    return 0.0\n")
    sound = solera("sweep", "grid.toml", "--only", "reward=good", cwd=tmp_path)
    assert sound.returncode == 0, sound.stdout  # of what was asked for, all is there
    assert "2 of 4 runs finished; 2 failed." in sound.stdout
    mended = solera("sweep", "grid.toml", "--retry", cwd=tmp_path)
    assert mended.returncode == 0, mended.stdout
    assert mended.stdout.count("finished  bad-s") == 2
    assert not json.loads((tmp_path / "sweeps/grid/failures.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: FILE.toml (see solera sweep --help)"),
        (["grid.toml", "--jobs", "0"], "--jobs is 0; it must be at least 1"),
        (["nothing.toml"], "nothing.toml: cannot be read"),
        (
            ["grid.toml", "--only", "regime=lagg"],
            "--only regime=lagg: grid.toml has algorithm=grpo, algorithm=reinforce, ",
        ),
        (["grid.toml", "--quick"], "grid.toml: has no table [quick]"),
    ],
)
def test_mistakes_take_one_line(tmp_path, arguments, says):
    (tmp_path / "grid.toml").write_text(GRID)
    done = solera("sweep", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"solera: {says}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "sweeps").exists()


def test_the_example_in_the_help_is_a_sweep(tmp_path):
    from solera.cli.sweep import EXAMPLE
    from solera.sweep.file import read_plan

    (tmp_path / "example.toml").write_text(EXAMPLE[EXAMPLE.index("[sweep]") : EXAMPLE.index("Every cell")])
    assert len(read_plan(tmp_path / "example.toml").cells) == 5
    assert len(read_plan(tmp_path / "example.toml", quick=True).cells) == 2
    assert "sweep.seeds" not in EXAMPLE
    assert "[axis.regime]" in solera("sweep", "--help").stdout
