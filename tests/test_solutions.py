"""Solutions of a task as demonstrations: one command, graded, and never of a held-out problem."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from solera.config import Config, ModelConfig, TaskConfig, parse
from solera.models.loading import load_reader
from solera.objectives.table import resolve_config
from solera.records import NO_VERSION, Reward, Rollout, Sequence, Span
from solera.run import running, solutions
from solera.run.task import line_reader
from solera.store.database import place_in
from solera.store.ledger import Ledger
from solera.tasks.countdown import Countdown
from solera.tasks.keys import HeldOutError
from tests.command import solera
from tests.tasks.parts import Letters

TRAIN = [(a, b) for a in range(30, 36) for b in range(40, 46)]
TEST = [(91, 8), (92, 7), (93, 5)]
RUN = (
    "train", "--run.name", "sft", "--run.steps", "3", "--run.device", "cpu", "--task", "jsonl", "--task.path", "data",
    "--store.solutions", "worked", "--draw.policy", "offline", "--objective", "sft", "--collect.prompts", "8",
    "--collect.group_size", "1", "--evaluate.problems", "3", "--report.tensorboard", "False", "--report.page", "False",
)  # fmt: skip
COUNTDOWN = (
    "train", "--run.name", "sft", "--run.steps", "3", "--run.device", "cpu", "--task", "countdown",
    "--store.solutions", "solution", "--draw.policy", "offline", "--draw.order", "priority", "--objective", "sft",
    "--collect.prompts", "8", "--collect.group_size", "1", "--evaluate.problems", "3", "--report.tensorboard", "False",
    "--report.page", "False",
)  # fmt: skip


def row(a: int, b: int, prompt: str | None = None) -> dict[str, str]:
    return {"prompt": prompt or f"{a}+{b}=", "answer": str(a + b), "worked": str(a + b)}


def write(folder, train, test) -> None:
    (folder / "data").mkdir()
    for split, rows in (("train", train), ("test", test)):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def stored(folder) -> list[tuple[str, str, float]]:
    with sqlite3.connect(folder / "runs/sft/store.db") as database:
        query = "select r.prompt_key, r.origin, w.value from rollouts r join rewards w on w.rollout_id = r.id"
        return database.execute(query).fetchall()


def test_one_command_learns_from_the_solutions_of_training_problems(tmp_path):
    wrong = {**row(30, 40), "worked": "71"}
    write(tmp_path, [wrong, *(row(*pair) for pair in TRAIN[1:])], [row(*pair) for pair in TEST])
    done = solera(*RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "36 solutions imported (mean reward 0.972); none solves one of the 3 held-out problems" in done.stdout
    rows = stored(tmp_path)
    assert len(rows) == len({key for key, _, _ in rows}) == 36
    assert {origin for _, origin, _ in rows} == {"file:solutions"}
    assert sorted(value for _, _, value in rows) == [0.0] + [1.0] * 35  # 30+40 is not 71

    checked = solera("data", "verify", "runs/sft", "--held-out", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "36 responses compared with 3 held-out problems" in checked.stdout

    (tmp_path / "data" / "test.jsonl").write_text(json.dumps(row(33, 44)) + "\n")  # was trained on
    leaked = solera("data", "verify", "runs/sft", "--held-out", cwd=tmp_path)
    assert leaked.returncode == 1
    assert leaked.stderr.count("answers a held-out problem of the task") == 1


def test_a_problem_on_both_sides_stays_out_of_training_however_it_is_spaced(tmp_path):
    on_both = [row(91, 8), row(92, 7, "  92+7="), row(93, 5, "93+5=\n")]
    write(tmp_path, [*on_both, *(row(*pair) for pair in TRAIN)], [row(*pair) for pair in TEST])
    done = solera(*RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "36 solutions imported" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--store.solutions", "solution"], "data/train.jsonl:1: field 'solution' is missing (store.solutions)"),
        (
            ["--task", "arithmetic", "--task.path", ""],
            "store.solutions needs a task with solutions (gsm8k, math, jsonl or countdown), not arithmetic: remove it",
        ),
        (
            ["--task", "countdown", "--task.path", ""],
            "store.solutions is 'worked'; for the task countdown it must be 'solution'",
        ),
    ],
)
def test_mistakes_take_one_line(tmp_path, arguments, says):
    write(tmp_path, [row(*pair) for pair in TRAIN], [row(*pair) for pair in TEST])
    given = [*RUN, *arguments]
    if "--task" in arguments:
        given = [one for one in given if one not in ("--task.path", "data", "")]
    done = solera(*given, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "runs").exists()


def test_countdown_solves_the_first_problems_of_its_stream(tmp_path, small_chat_model):
    done = solera(*COUNTDOWN, "--model", small_chat_model, "--run.seed", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "24 solutions imported (mean reward 1); none solves a held-out problem" in done.stdout
    stream = Countdown(Letters(), 3, "{prompt}", seed=5)
    keys = [stream.prompt(index).key for index in range(40)]
    assert len(set(keys)) == 40
    assert [key for key, _, _ in stored(tmp_path)] == keys[:24]
    assert {(origin, value) for _, origin, value in stored(tmp_path)} == {("file:solutions", 1.0)}
    with sqlite3.connect(tmp_path / "runs/sft/store.db") as database:
        drawn = database.execute("select count(*), count(distinct rollout_id) from uses").fetchone()
    assert drawn == (24, 24)  # as many as the run draws

    longer = solera("train", "--resume", "runs/sft", "--run.steps", "5", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert [key for key, _, _ in stored(tmp_path)] == keys  # 16 more, and none twice


def test_a_check_proves_that_no_held_out_problem_of_countdown_was_trained_on(tmp_path, small_chat_model):
    done = solera(*COUNTDOWN, "--model", small_chat_model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checked = solera("data", "verify", "runs/sft", "--held-out", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "24 of 24 responses state a problem of countdown" in checked.stdout

    problems = Countdown(load_reader(str(small_chat_model)).codec, 3, "{prompt}", seed=0)
    ledger = Ledger(place_in(tmp_path / "runs/sft"))
    ledger.add_imported([answered(problems.held_out(1)[0].token_ids), answered((12, 34, 56))])  # not as users import
    ledger.close()
    leaked = solera("data", "verify", "runs/sft", "--held-out", cwd=tmp_path)
    assert leaked.returncode == 1
    assert "25 of 26 responses state a problem of countdown" in leaked.stdout
    assert leaked.stderr.splitlines() == ["solera: rollout 25: answers a held-out problem of the task"]


def answered(prompt_ids: tuple[int, ...]) -> Rollout:
    start = len(prompt_ids)
    sequence = Sequence(np.array([*prompt_ids, 1], np.int32), (Span(start, start + 1, NO_VERSION),), None)
    return Rollout(f"countdown/{start}", (sequence,), (Reward(1.0),), None, "file:solutions", "stop")


def test_a_solution_of_a_held_out_problem_is_refused(small_chat_model):
    """Even if the split let it through."""
    reader = load_reader(str(small_chat_model))
    config = resolve_config(Config(task=TaskConfig("countdown"), model=ModelConfig(path=str(small_chat_model))))
    (prompt,) = Countdown(reader.codec, 3, "{prompt}", seed=0).held_out(1)
    line = {"prompt": prompt.data["prompt"], "response": "<answer>1</answer>", "key": prompt.key}
    with pytest.raises(HeldOutError):
        line_reader(config, reader, Path("solutions"))(json.dumps(line).encode(), "here")


def test_sums_are_checked_by_their_rule(tmp_path):
    done = solera(
        "train", "--run.name", "sums", "--run.steps", "2", "--run.device", "cpu", "--collect.prompts", "4",
        "--collect.group_size", "2", "--evaluate.problems", "3", "--report.tensorboard", "False", "--report.page",
        "False", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    checked = solera("data", "verify", "runs/sums", "--held-out", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "16 of 16 responses state a problem of arithmetic" in checked.stdout


def test_a_long_run_does_not_import_more_solutions_than_memory_holds(tmp_path, small_chat_model, monkeypatch):
    monkeypatch.setattr(solutions, "MOST_GENERATED", 10)
    config = parse(
        f"""
        run = {{ root = "{tmp_path}", name = "sft", steps = 3, device = "cpu" }}
        model = {{ path = "{small_chat_model}" }}
        task = {{ name = "countdown" }}
        store = {{ solutions = "solution" }}
        draw = {{ policy = "offline" }}
        collect = {{ prompts = 8, group_size = 1 }}
        objective = {{ name = "sft" }}
        evaluate = {{ every = 0, problems = 3 }}
        report = {{ tensorboard = false, progress = false, page = false }}
        """,
        "test",
    )
    running.train(config)
    with sqlite3.connect(tmp_path / "sft/store.db") as database:
        assert database.execute("select count(*) from rollouts").fetchone() == (10,)
