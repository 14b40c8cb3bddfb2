"""Problems from files, folders and tables; prompts in their template; countdown; mixtures."""

import asyncio
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from solera.config import Config, EvaluateConfig, TaskConfig, resolve_task, task_parts
from solera.errors import SoleraError
from solera.objectives.table import resolve_config
from solera.records import Prompt, Rollout
from solera.tasks.countdown import Countdown, is_held_out, solved_problems
from solera.tasks.expression import countdown, countdown_problem
from solera.tasks.graders import GRADERS
from solera.tasks.jsonl import Jsonl, split_rows
from solera.tasks.mathematics import math
from solera.tasks.mixture import Mixture
from solera.tasks.prompting import first_unknown
from tests.tasks.parts import Letters

GSM8K = Path(os.environ.get("SOLERA_GSM8K", "../shared/data/gsm8k"))


class Chatty(Letters):
    """The codec of a model with a chat template."""

    chats = True


def shown(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.token_ids))


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(*numbers: int) -> list[dict]:
    return [{"question": f"What is {n}?", "answer": f"It is\n#### {n}"} for n in numbers]


def gsm8k(**fields) -> Jsonl:
    return Jsonl(resolve_task(TaskConfig("gsm8k", **fields)), Chatty(), 0, None, frozenset({"number"}))


def test_a_folder_has_its_splits(tmp_path):
    write(tmp_path / "train.jsonl", questions(1, 2, 3))
    write(tmp_path / "test.jsonl", questions(3, 4))
    task = gsm8k(path=str(tmp_path))
    assert {task.prompt(i).data["question"] for i in range(4)} == {"What is 1?", "What is 2?"}  # 3 is a test problem
    assert {p.data["question"] for p in task.held_out(9)} == {"What is 3?", "What is 4?"}
    assert shown(task.prompt(0)).startswith("<user>What is ")
    assert "####" in shown(task.prompt(0))


def test_data_for_evaluation_alone_is_not_trained_on(tmp_path):
    task = gsm8k(held_out_path=str(write(tmp_path / "test.jsonl", questions(3, 4))))
    assert len(task.held_out(9)) == 2
    with pytest.raises(SoleraError, match="nothing to train on"):
        task.prompt(0)


def test_tables_are_read_by_datasets(tmp_path):
    import datasets

    datasets.Dataset.from_list(questions(5, 6, 7)).to_parquet(tmp_path / "test.parquet")
    assert len(gsm8k(path=str(tmp_path)).held_out(9)) == 3


@pytest.mark.parametrize(
    ("answers", "given"),
    [(["3", "2.5", "7", "12"], "3"), (["007", "042", "010", "123"], "007"), (["true", "1e3", "NA", "None"], "NA")],
)
def test_cells_of_a_csv_file_are_the_text_that_is_written_there(tmp_path, answers, given):
    file = tmp_path / "data.csv"
    rows = [f'"What, {n}?",{answer},{n},\n' for n, answer in enumerate(answers * 5)]
    file.write_text("\ufeffprompt,answer,level,note\n" + "".join(rows), encoding="utf-8")
    task = resolve_task(TaskConfig("jsonl", path=str(file)))
    training, held_out = split_rows(task, frozenset(("exact",)))
    rows = {row.data["prompt"]: row.data for row in training + held_out}
    n = answers.index(given)
    assert rows[f"What, {n}?"] == {"prompt": f"What, {n}?", "answer": given, "level": str(n), "note": None}
    assert {row["answer"] for row in rows.values()} == set(answers)
    assert GRADERS["exact"](given, str(rows[f"What, {n}?"]["answer"]), True)


def test_numbers_in_a_csv_file_are_graded_by_value(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("prompt,answer\n" + "".join(f"What is {n} + 0.50?,{n}.50\n" for n in range(20)))
    task = Jsonl(resolve_task(TaskConfig("jsonl", path=str(file))), Letters(), 0, None, frozenset(("number",)))
    answer = task.prompt(0).data["answer"]
    assert answer.endswith(".50") and GRADERS["number"](f"It is {float(answer)}", answer, True)


def test_mathematics_by_hub_name_with_answers_or_with_boxed_solutions(monkeypatch):
    import datasets

    rows = {
        "HuggingFaceH4/MATH-500": {"problem": "1+1?", "solution": "so $\\boxed{2}$.", "answer": "2", "level": 1},
        "math-ai/aime24": {"id": 60, "problem": "9*9?", "solution": "\\boxed{81}", "url": "x"},
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **_: {"test": [rows[path]]})
    for name, answer in (("HuggingFaceH4/MATH-500", "2"), ("math-ai/aime24", "\\boxed{81}")):
        task = Jsonl(resolve_task(TaskConfig("math", held_out_path=name)), Chatty(), 0, None, frozenset({"math"}))
        (prompt,) = task.held_out(9)
        assert prompt.data["answer"] == answer
        assert asyncio.run(math(f"It is \\boxed{{{answer}}}.", prompt.data["answer"], True))
        assert not asyncio.run(math("It is \\boxed{3}.", prompt.data["answer"], True))


def test_nothing_is_fetched_unasked(tmp_path):
    for name in ("gsm8k", "math"):
        with pytest.raises(SoleraError, match=r"task[.]path is unset: give a folder"):
            resolve_task(TaskConfig(name))
    with pytest.raises(SoleraError, match=r"neither train\.jsonl nor test\.jsonl"):
        gsm8k(path=str(tmp_path))
    with pytest.raises(SoleraError, match="cannot be read"):
        gsm8k(path=str(tmp_path / "nowhere.jsonl"))


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here (SOLERA_GSM8K=FOLDER)")
def test_gsm8k_itself():
    task = gsm8k(path=str(GSM8K))
    assert len(task.held_out(2000)) == 1319
    assert len({task.prompt(i).key for i in range(7473)}) == 7473


def test_a_template_needs_the_problems_place():
    with pytest.raises(SoleraError, match=r"must contain \{prompt\}"):
        resolve_task(TaskConfig("gsm8k", path="x.jsonl", template="Think!"))


def test_countdown_problems_have_solutions_and_their_sides():
    task = Countdown(Chatty(), 3, "{prompt} Go.", seed=1)
    training, held_out = [task.prompt(i) for i in range(100)], task.held_out(50)
    assert shown(training[0]).startswith("<user>Make ")
    for prompt in training + held_out:
        numbers, target = countdown_problem(prompt.data["answer"])
        assert len(numbers) == 3 and 0 < target <= 990
        assert solvable(tuple(numbers), target)
    assert not any(is_held_out(prompt.data["answer"]) for prompt in training)
    assert all(is_held_out(prompt.data["answer"]) for prompt in held_out)


@pytest.mark.parametrize(
    ("level", "training", "held_out"),
    [
        (2, ["83 89 = 172", "61 69 = 130", "24 35 = 840"], ["15 79 = 94", "53 88 = 35"]),
        (3, ["25 60 60 = 25", "52 60 81 = 89", "28 37 98 = 107"], ["10 29 83 = 122", "6 60 65 = 11"]),
        (4, ["14 33 41 55 = 762", "20 31 34 73 = 158", "5 14 15 41 = 37"], ["36 54 58 75 = 954", "27 33 51 64 = 7"]),
        (
            6,
            ["1 25 29 47 77 96 = 275", "32 33 33 33 62 79 = 529", "6 27 44 54 86 86 = 135"],
            ["8 15 50 63 79 90 = 240", "10 51 60 74 83 91 = 369"],
        ),
    ],
)
def test_countdown_problems_are_those_of_the_first_version(level, training, held_out):
    """Written down before problems came with solutions. Other problems would make another run of every seed."""
    task = Countdown(Letters(), level, "{prompt}", seed=7)
    assert [task.prompt(index).data["answer"] for index in (0, 1, 2**33)] == training
    assert [prompt.data["answer"] for prompt in task.held_out(2)] == held_out


@pytest.mark.parametrize("level", range(2, 7))
def test_solutions_of_countdown_are_right(level):
    """By Python's own arithmetic, and by the grader."""
    several = list(solved_problems(3, level, 300))
    assert len({solved.problem for solved in several}) == 300
    for solved in several:
        numbers, target = countdown_problem(solved.problem)
        assert eval(solved.expression) == target
        assert sorted(map(int, re.findall("[0-9]+", solved.expression))) == numbers
        assert countdown(solved.response, solved.problem, finished=False)
        opened = solved.expression.count("(")
        assert solved.expression.startswith("(" * opened) and opened == level - 2  # one for each intermediate result
    assert {sign for solved in several for sign in "+-*/" if sign in solved.expression} == set("+-*/")


def test_solutions_are_of_the_training_stream_each_problem_once():
    task = Countdown(Letters(), 2, "{prompt}", seed=3)
    stream = [task.prompt(index).data["answer"] for index in range(3000)]
    different = list(dict.fromkeys(stream))
    assert len(different) < 2900  # level 2 repeats itself
    assert [solved.problem for solved in solved_problems(3, 2, 2000)] == different[:2000]
    every = [solved.problem for solved in solved_problems(3, 2, 10**9)]  # ends when nothing new is found
    assert len(every) == len(set(every)) > 9000
    assert not any(map(is_held_out, every))
    assert not set(every) & {prompt.data["answer"] for prompt in task.held_out(1487)}


def test_a_model_that_cannot_spell_countdown_is_told_so():
    class Digits(Letters):
        unknown_id = -1

        def encode(self, text):
            return tuple(ord(c) if c in "0123456789=" else -1 for c in text)

    with pytest.raises(
        SoleraError, match="task countdown: its prompt holds 'M', which the model's tokenizer does not know"
    ):
        Countdown(Digits(), 3, "{prompt}", seed=1).prompt(0)


@pytest.mark.parametrize(
    ("known", "text", "first"),
    [
        ("abc", "ab cd", " "), ("abc ", "ab cd", "d"), ("abc ", "ab\ncd", "\n"), ("abcd ", "ab cd", None),
        ("", "é", "é"),
    ],
)  # fmt: skip
def test_the_first_character_that_a_vocabulary_cannot_spell(known, text, first):
    class Some(Letters):
        unknown_id = -1

        def encode(self, text):
            return tuple(ord(c) if c in known else -1 for c in text)

    assert first_unknown(Some(), text) == first


def test_of_a_vocabulary_of_words_the_word_is_named():
    class Words(Letters):
        unknown_id = -1

        def encode(self, text):
            return tuple({"the": 1, "cat": 2, "d": 4, "o": 5, "g": 6}.get(word, -1) for word in text.split())

    assert first_unknown(Words(), "the cat the dog") == "dog"
    assert first_unknown(Words(), "the cat") is None


def solvable(numbers, target) -> bool:
    """By trying every pair, every operation, and what is left."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
            results = [a + b, a - b, a * b, *([a / b] if b else [])]
            if i != j and any(solvable((*rest, result), target) for result in results):
                return True
    return False


class Counting:
    """A task that says who it is."""

    def __init__(self, name):
        self.name = name

    def prompt(self, index):
        return Prompt(f"{self.name}-{index}", (1,))

    def held_out(self, count):
        return [Prompt(f"{self.name}-held-{i}", (1,)) for i in range(min(count, 2))]

    async def run(self, prompt, generate):
        assert prompt.key.startswith(self.name)
        return Rollout(prompt.key, (), origin=self.name)


@pytest.mark.parametrize(
    ("task", "given", "threshold"),
    [
        (TaskConfig(), None, 0.5),
        (TaskConfig("countdown"), None, 0.5),
        (TaskConfig("gym:gcd"), None, 0.99),
        (TaskConfig("gym:gcd"), 0.5, 0.5),
        (TaskConfig("mixture", parts=("arithmetic", "gym:gcd@1")), None, 0.99),
        (TaskConfig("mixture", parts=("arithmetic@1", "countdown")), None, 0.5),
        (TaskConfig("arithmetic"), 0.75, 0.75),
    ],
)
def test_what_passes_depends_on_the_task_unless_it_is_said(task, given, threshold):
    config = Config(task=task, evaluate=EvaluateConfig(threshold=given))
    assert resolve_config(config).evaluate.threshold == threshold


def test_a_mixture_gives_each_task_its_share_and_its_own_prompts_in_order():
    mixture = Mixture({"a": Counting("a"), "b": Counting("b")}, {"a": 3.0, "b": 1.0})
    keys = [mixture.prompt(i).key for i in range(400)]
    assert Counter(key[0] for key in keys) == {"a": 300, "b": 100}
    assert [key for key in keys if key[0] == "b"][:3] == ["b/b-0", "b/b-1", "b/b-2"]
    assert all(abs(sum(key[0] == "a" for key in keys[:n]) - 0.75 * n) <= 1 for n in range(1, 400))
    assert [p.key for p in mixture.held_out(5)] == ["a/a-held-0", "a/a-held-1", "b/b-held-0", "b/b-held-1"]
    rollout = asyncio.run(mixture.run(mixture.prompt(0), None))
    assert (rollout.prompt_key, rollout.origin) == ("a/a-0", "a")


def test_parts_of_a_mixture_are_named_and_refused_with_what_is_wrong():
    parts = task_parts(resolve_task(TaskConfig("mixture", parts=("arithmetic@1", "countdown@4", "gym:gcd", "gsm8k=d"))))
    assert {name: part.level for name, part in parts.items()} == {
        "arithmetic@1": 1, "countdown@4": 4, "gym:gcd": None, "gsm8k d": None,
    }  # fmt: skip
    for wrong, says in [
        (("arithmetic@9",), "levels 1 to 4"), (("gsm8k",), "task.path is unset: give a folder"),
        (("mixture",), "cannot contain a mixture"), (("countdown", "countdown"), "listed twice"),
        (("gym:gcd@x",), "a whole number"), ((), "task.parts is empty"),
        (("nothing",), "task.name is 'nothing'"),
    ]:  # fmt: skip
        with pytest.raises(SoleraError, match=says):
            resolve_task(TaskConfig("mixture", parts=wrong))
    with pytest.raises(SoleraError, match=r"task\.weights"):
        resolve_task(TaskConfig("mixture", parts=("arithmetic",), weights=(1.0, 2.0)))
