"""A draw that leaves its batches half empty is spoken of once, with the reason and what to do."""

import io
import json

import pytest
from rich.console import Console

from solera.config import Config, DrawConfig
from solera.report.shortage import Shortage
from solera.run.running import train
from tests.conftest import merge


def said(*rows, prompts=32):
    sentences = []
    sink = Shortage(DrawConfig("offline"), prompts, sentences.append)
    for step, row in enumerate(rows):
        sink.log(step, row)
    return sentences


def test_the_first_short_batch_is_told_with_the_reason_that_took_most():
    short = {"groups/drawn": 15, "draw/unrewarded": 40, "draw/used_up": 1234}
    (sentence,) = said({"groups/drawn": 16}, short, {**short, "draw/unrewarded": 9999})
    assert sentence.startswith("step 1: 15 of collect.prompts = 32 groups drawn; 1,234 rollouts were used draw.max")


@pytest.mark.parametrize("row", [{"groups/drawn": 32, "draw/incomplete": 9}, {"groups/drawn": 40}, {"eval/pass@1": 1}])
def test_silence(row):
    assert said(row) == []


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "the store has no more"),
        ({"draw/incomplete": 5}, "lower draw.min_rewarded"),
        ({"draw/flat": 5}, "draw.min_spread"),
        ({"draw/too_old": 5}, "draw.max_age"),
        ({"draw/unrewarded": 5}, "solera data reward"),
        ({"draw/leftover": 5}, 'lower draw.min_rewarded, or, if rewards come late, set draw.leftovers to "keep"'),
    ],
)
def test_each_reason_has_its_remedy(row, told):
    (sentence,) = said({"groups/drawn": 0, **row})
    assert told in sentence


def test_a_run_whose_responses_get_no_reward_says_so_by_default():
    sentences = []
    Shortage(DrawConfig(), 32, sentences.append).log(0, {"groups/drawn": 3})
    assert sentences[0].startswith(
        "step 0: 3 of collect.prompts = 32 groups drawn; the others have no reward: make sure"
    )


def test_a_run_mixed_within_groups_says_that_the_teacher_answered_too_little(tmp_path):
    answers = tmp_path / "teacher.jsonl"
    line = {"prompt": "37+41=", "response": "78", "model": "teacher", "reward": 1.0}
    answers.write_text("".join(json.dumps({**line, "response": str(78 + k % 2)}) + "\n" for k in range(8)))
    toml = f"""
        run = {{ root = "{tmp_path}", name = "short", steps = 2, device = "cpu" }}
        collect = {{ prompts = 8, group_size = 4 }}
        evaluate = {{ every = 0, problems = 8 }}
        report = {{ tensorboard = false }}
        objective = {{ name = "red_weight" }}
        store = {{ data = ["{answers}"] }}
        draw = {{ policy = "mixed", mix = "within", shares = ["self=1", "model:teacher=1"] }}
    """
    shown = io.StringIO()
    train(merge(Config(), toml), Console(file=shown, width=400))
    (note,) = [line for line in shown.getvalue().splitlines() if "groups drawn" in line]
    assert note.startswith("note: step 0: 0 of collect.prompts = 8 groups drawn; ")
    assert "let it answer the task's own prompts" in note
