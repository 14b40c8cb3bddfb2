"""Expected answers, found by the keys that prompts have in a run."""

import json
from pathlib import Path

import pytest

from solera.config import TaskConfig, resolve_task
from solera.errors import SoleraError
from solera.tasks.answers import answers_of
from solera.tasks.jsonl import Jsonl
from tests.tasks.parts import Letters
from tests.tasks.test_gym import task as gym_task

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b, "gold": f"<{a + b}>"} for a in range(4, 24) for b in range(9)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def located(folder: Path, **fields) -> TaskConfig:
    """The task as a run in that folder has it, its path written out."""
    return resolve_task(TaskConfig("jsonl", path=str(folder / "data" / "sums.jsonl"), **fields))


def test_a_generated_problem_says_its_answer_in_its_key():
    sums = answers_of(resolve_task(TaskConfig("arithmetic")), Path())
    assert [sums(key) for key in ("arithmetic/37+45=", "arithmetic/0+0=", "text/00", "p")] == ["82", "0", None, None]
    countdown = answers_of(resolve_task(TaskConfig("countdown")), Path())
    assert [countdown(key) for key in ("countdown/3 5 7 = 26", "text/00")] == ["26 from 3, 5, 7", None]


@pytest.mark.parametrize(("column", "form"), [(None, "{}"), ("gold", "<{}>")])
def test_rows_of_a_file_in_the_folder_where_the_run_began(folder, column, form):
    problems = Jsonl(located(folder, answer=column), Letters(), seed=0)
    answer = answers_of(resolve_task(TaskConfig("jsonl", path="data/sums.jsonl", answer=column)), folder)
    for prompt in map(problems.prompt, range(40)):
        a, b = prompt.data["prompt"].removesuffix("=").split("+")
        assert answer(prompt.key) == form.format(int(a) + int(b))


def test_a_row_that_was_edited_since_has_no_answer(folder):
    problems = Jsonl(located(folder), Letters(), seed=0)
    prompts = [problems.prompt(index) for index in range(40)]
    file = folder / "data" / "sums.jsonl"
    file.write_text(file.read_text().replace('"answer": 1', '"answer": 2'))
    answer = answers_of(located(folder), folder)
    edited = [str(prompt.data["answer"]).startswith("1") for prompt in prompts]
    assert [answer(prompt.key) is None for prompt in prompts] == edited
    assert any(edited) and not all(edited)


def test_a_file_that_is_gone_is_said_and_not_looked_for_on_the_network(tmp_path):
    with pytest.raises(SoleraError, match=r"data/sums\.jsonl: the file no longer exists"):
        answers_of(resolve_task(TaskConfig("jsonl", path="data/sums.jsonl")), tmp_path)


def test_a_mixture_asks_the_part_that_the_key_names(folder):
    task = resolve_task(TaskConfig("mixture", parts=("arithmetic", "jsonl=data/sums.jsonl")))
    answer, rows = answers_of(task, folder), Jsonl(located(folder), Letters(), seed=0)
    prompt = rows.prompt(0)
    assert answer("arithmetic/arithmetic/3+4=") == "7"
    assert answer(f"jsonl sums/{prompt.key}") == str(prompt.data["answer"])
    assert answer(f"arithmetic/{prompt.key}") is None and answer("text/0123") is None


def test_the_gym_gives_the_answers_of_its_problems():
    pytest.importorskip("reasoning_gym")
    answer = answers_of(resolve_task(TaskConfig("gym:chain_sum")), Path())
    for prompt in map(gym_task().prompt, range(3)):
        terms = prompt.data["prompt"].split(":")[-1].strip(" =?.").replace(" ", "")
        assert answer(prompt.key) == str(eval(terms))
    assert answer("text/00") is None
