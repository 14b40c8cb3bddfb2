"""The example with a calculator: its problems, and what it rewards."""

import asyncio
import json
from pathlib import Path

import pytest

from solera.tasks.own import load_task
from tests.command import run_script
from tests.tasks.chatting import TEMPLATES, codec_of, small_tokenizer
from tests.tasks.test_conversation import Scripted

EXAMPLE = Path(__file__).parents[2] / "examples/calculator"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def test_problems_are_right_and_never_twice_in_any_order(tmp_path):
    pytest.importorskip("reasoning_gym")
    done = run_script(EXAMPLE / "problems.py", tmp_path / "problems.jsonl", 3000)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    factors = [
        tuple(sorted(int(word) for word in row["question"].replace(".", "").split() if word.isdigit())) for row in rows
    ]
    assert all(a * b == int(row["answer"]) for (a, b), row in zip(factors, rows, strict=True))
    assert len(set(factors)) == len(rows) > 2000


@pytest.fixture
def task(tmp_path, monkeypatch):
    rows = [{"question": f"Solve: {n} * 3. Give only the result.", "answer": str(3 * n)} for n in range(2000)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("PROBLEMS", str(tmp_path / "problems.jsonl"))
    tokenizer = small_tokenizer(TEMPLATES["smollm2"])

    def make(name: str):
        return load_task(f"{EXAMPLE / 'task.py'}:{name}")(codec_of(tokenizer, TEMPLATES["smollm2"])), tokenizer

    return make


@pytest.mark.parametrize(
    ("name", "turns", "reward"),
    [
        ("WithCalculator", (CALL % "1007 * 3", "The answer is 3021."), 1.0),
        ("WithCalculator", (CALL % "1007 * 4", "The answer is 4028."), 0.0),
        ("WithCalculator", ("The answer is 3021.",), 1.0),  # the tool need not be used
        ("WithCalculator", (CALL % "1007 * 3", CALL % "1007 * 3"), 0.0),  # two turns at most
        ("Alone", ("1000 * 3 = 3000. 7 * 3 = 21. The answer is 3,021.",), 1.0),
        ("Alone", (CALL % "1007 * 3",), 0.0),  # there is no tool
    ],
)
def test_what_an_episode_earns(task, name, turns, reward):
    made, tokenizer = task(name)
    script = Scripted(tokenizer, *turns)
    rollout = asyncio.run(made.run(made.prompt(7), script))
    assert [one.value for one in rollout.rewards] == [reward]
    assert not script.texts
    if name == "WithCalculator" and len(turns) == 2:
        shown = tokenizer.decode(script.given[1])
        assert shown.count("<tool_response>") == 4 and shown.count("</tool_call>") >= 4  # three of them are examples


def test_held_out_problems_are_not_trained_on(task):
    made, _ = task("Alone")
    assert not {one.key for one in made.held_out(1000)} & {made.prompt(index).key for index in range(3000)}
