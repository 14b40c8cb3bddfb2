"""Solutions of a task as demonstrations: one command, graded, and never of a held-out problem."""

import json
import sqlite3

import pytest

from tests.command import solera

TRAIN = [(a, b) for a in range(30, 36) for b in range(40, 46)]
TEST = [(91, 8), (92, 7), (93, 5)]
RUN = (
    "train", "--run.name", "sft", "--run.steps", "3", "--run.device", "cpu", "--task", "jsonl", "--task.path", "data",
    "--store.solutions", "worked", "--draw.policy", "offline", "--objective", "sft", "--collect.prompts", "8",
    "--collect.group_size", "1", "--evaluate.problems", "3", "--report.tensorboard", "False", "--report.page", "False",
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
        (["--task", "arithmetic", "--task.path", ""], "store.solutions needs a task with a file of problems"),
    ],
)
def test_mistakes_take_one_line(tmp_path, arguments, says):
    write(tmp_path, [row(*pair) for pair in TRAIN], [row(*pair) for pair in TEST])
    given = [*RUN, *arguments]
    if "arithmetic" in arguments:
        given = [one for one in given if one not in ("--task.path", "data", "")]
    done = solera(*given, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "runs").exists()
