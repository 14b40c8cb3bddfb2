"""Where metrics go, each read back by its own reader."""

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from solera.report.console import Progressing
from solera.report.plot import plot_run
from solera.report.sinks import JsonLines, TeeSink, TensorBoard, read_metrics
from tests.command import solera

ROWS = [{"reward/mean": 0.25, "eval/pass@1": 0.5}, {"reward/mean": 0.75}]


def test_json_lines_and_tensorboard_hold_what_was_logged(tmp_path):
    sink = TeeSink([JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "events")])
    for step, row in enumerate(ROWS):
        sink.log(step, row)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == step + 1  # there before the next step
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": i, **row} for i, row in enumerate(ROWS)]
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.25), (1, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("eval/pass@1")] == [(0, 0.5)]


@pytest.mark.parametrize("start", [0, 1, 2])
def test_tensorboard_forgets_the_steps_that_a_resumed_run_writes_again(tmp_path, start):
    """Without a checkpoint a run starts again at step 0."""
    for steps, value in ((range(3), 0.25), (range(start, start + 1), 0.75)):
        sink = TensorBoard(tmp_path, steps.start)
        for step in steps:
            sink.log(step, {"reward/mean": value})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [(e.step, e.value) for e in events] == [*((step, 0.25) for step in range(start)), (start, 0.75)]


def test_weights_and_biases_offline(tmp_path):
    pytest.importorskip("wandb")
    program = f"""
from pathlib import Path
from solera.report.sinks import WeightsAndBiases, need_wandb
need_wandb()
sink = WeightsAndBiases("project", "name", Path({str(tmp_path)!r}), {{"run": {{"seed": 3}}}})
sink.log(0, {{"reward/mean": 0.25}})
sink.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (data,) = tmp_path.rglob("*.wandb")
    assert b"reward/mean" in data.read_bytes()


def test_weights_and_biases_without_a_key_is_said_in_one_line_with_what_to_do(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    small = "--run.steps 1 --collect.prompts 2 --evaluate.problems 2 --run.device cpu --run.name mine".split()  # noqa: SIM905
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    nowhere = {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "settings")}
    done = solera("train", "--report.wandb", "project", *small, cwd=tmp_path, **nowhere)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("solera: runs/mine: report.wandb: ")
    assert line.endswith(
        "(or set WANDB_MODE=offline); once that is fixed, continue with: solera train --resume runs/mine"
    )
    assert "Traceback" not in done.stderr


def test_off_a_terminal_a_line_at_each_evaluation_with_the_oldest_data_since(tmp_path):
    with (tmp_path / "out").open("w") as file:
        sink = Progressing(2, Console(file=file))
        for step, row in enumerate([*ROWS, {"eval/pass@1": 1.0}]):
            sink.log(step, {**row, "age/max": step % 2, "age/mean": 0})
        sink.close()
    assert (tmp_path / "out").read_text().splitlines() == [
        "step 0/2  reward 0.25  held-out 50.0%  age ≤ 0",
        "step 2/2  reward 0.75  held-out 100.0%  age ≤ 1",
    ]


def test_text_of_others_has_no_age_on_the_console():
    console = Console(file=StringIO(), width=100)
    sink = Progressing(2, console)
    sink.log(0, {"eval/pass@1": 0.5, "age/max": 3.0, "age/mean": 1.0})
    sink.log(1, {"eval/pass@1": 0.6, "reward/mean": 0.1})
    told = console.file.getvalue().splitlines()
    assert told == ["step 0/2  held-out 50.0%  age ≤ 3", "step 1/2  reward 0.10  held-out 60.0%"]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "step  192/1000  reward 0.97  held-out 100.0%  age ≤ 19  update 192 inconclusive"),
        (100, "step  192/1000  reward 0.97  held-out 100.0%  age ≤ 19  syncs 100  update 192 inconclusive"),
    ],
)
def test_a_line_with_a_verdict_fits_the_terminal(width, line):
    assert len(line) <= width
    console = Console(file=StringIO(), width=width)
    row = {"reward/mean": 0.97, "eval/pass@1": 1.0, "age/max": 19.0, "sync/count": 100.0, "improvement/state": 0.0}
    Progressing(1000, console).log(192, row)
    assert console.file.getvalue() == f"{line}\n"


def console_lines(rows: list[dict[str, float]], width: int = 100) -> list[str]:
    console = Console(file=StringIO(), width=width)
    sink = Progressing(len(rows) - 1, console)
    for step, row in enumerate(rows):
        sink.log(step, row)
    sink.close()
    return console.file.getvalue().splitlines()


def test_a_verdict_is_printed_once_with_its_step():
    rows = [{"eval/pass@1": 0.5} if step % 2 == 0 else {"reward/mean": 0.25} for step in range(9)]
    rows[1]["improvement/state"] = 1.0
    rows[4]["improvement/state"] = -1.0  # in a row with an evaluation
    assert console_lines(rows) == [
        "step 0/8  held-out 50.0%",
        "step 2/8  reward 0.25  held-out 50.0%  update 1 certified",
        "step 4/8  reward 0.25  held-out 50.0%  update 4 harmful",
        "step 6/8  reward 0.25  held-out 50.0%",
        "step 8/8  reward 0.25  held-out 50.0%",
    ]


def test_several_verdicts_between_two_lines_are_all_told_and_the_line_fits():
    judged = [{"improvement/state": float(state)} for state in (1, 0, -1)]
    assert console_lines([{}, *judged, {"eval/pass@1": 1.0}])[-1].endswith(
        "held-out 100.0%  updates 1 certified, 2 inconclusive, 3 harmful"
    )
    many = [{"improvement/state": float(state), "reward/mean": 0.97} for state in [1] * 12 + [0] * 5 + [-1] * 3]
    for width in (80, 100):
        (line,) = console_lines([{}, *many, {"eval/pass@1": 1.0, "age/max": 19.0, "sync/count": 100}], width)
        assert len(line) <= width and re.search(r"updates 1-20: (12 certified, 5 inconclusive, )?3(/20)? harmful", line)


@pytest.mark.parametrize("width", [80, 150])
def test_on_a_terminal_a_bar_with_figures(tmp_path, width):
    with (tmp_path / "out").open("w") as file:
        sink = Progressing(200, Console(file=file, force_terminal=True, width=width))
        for step, row in enumerate(ROWS):
            sink.log(step, {**row, "age/mean": 4.0, "sync/count": 1, "improvement/state": -1.0})
        sink.close()
    shown = (tmp_path / "out").read_text()
    for figure in ("reward 0.75", "held-out 50.0%", "age 4", "syncs 1", "update 0 harmful", "1/200", "ETA"):
        assert figure in shown


@pytest.mark.parametrize("width", [80, 150])
def test_during_a_long_step_the_tokens_so_far_show_that_it_goes_on(monkeypatch, width):
    console = Console(file=StringIO(), force_terminal=True, width=width)
    sink, engine = Progressing(200, console), [1000]
    sink.watch(lambda: engine[0])
    sink.log(3, ROWS[0])
    engine[0] = 3000
    assert "tokens so far" not in drawn(sink)
    monkeypatch.setattr("solera.report.console.LONG", 0.0)
    assert "2,000 tokens so far  reward 0.25  held-out 50.0%" in drawn(sink)
    sink.log(4, ROWS[1])
    assert "tokens so far" not in drawn(sink)
    sink.close()


def drawn(sink: Progressing) -> str:
    """What the bar shows now."""
    console = Console(file=StringIO(), width=sink.console.width)
    console.print(sink._bar.get_renderable())
    return console.file.getvalue()


def test_a_run_without_anything_to_learn_is_still_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/pass@1": 0.0}) + "\n")
    assert plot_run(tmp_path).stat().st_size > 10_000
