"""A run that has nothing left to learn from says so, once; one that learns, or has learned, does not."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

from solera.config import Config
from solera.objectives.objective import custom_objective
from solera.report.console import Progressing
from solera.report.run_folder import read_run
from solera.report.stalling import Stalling, compares, stall
from solera.report.summary import main_figures
from solera.run.build import sinks_of
from solera.run.own_code import OwnCode
from solera.run.parts import Parts, resolved


def rows(*flat, reward=0.5):
    return [{"reward/zero_variance_fraction": share, "reward/mean": reward} for share in flat]


def said(batches, accuracy=None):
    sentences = []
    sink = Stalling(sentences.append)
    sink.log(0, {} if accuracy is None else {"eval/pass@1": accuracy})
    for step, row in enumerate(batches, 1):
        sink.log(step, row)
    return sentences


def test_ten_flat_batches_are_said_once():
    sentences = said(rows(*[0.2] * 5, *[1.0] * 30), accuracy=0.45)
    assert len(sentences) == 1
    # (1·0.2 + 9·1.0) / 10 = 0.92 is the first mean of ten that reaches 0.9: five learning batches, then nine flat ones
    assert sentences[0].startswith(
        "step 14: in the last 10 batches 92% of the groups had equal rewards (0.50 on average)"
    )


@pytest.mark.parametrize(
    ("batches", "accuracy"),
    [
        (rows(*[1.0] * 9), 0.1),  # too few to say
        (rows(*[0.85] * 40), 0.1),  # a few groups in each still differ
        (rows(*[1.0] * 40), 0.95),  # learned
        ([{"tokens/trained": 5}] * 40, 0.1),  # nothing was rewarded
    ],
)
def test_silence(batches, accuracy):
    assert said(batches, accuracy) == []
    assert stall(batches, accuracy) is None


def test_responses_that_are_cut_off_are_named_as_the_cause():
    flat = [row | {"response/truncated": share} for row, share in zip(rows(*[1.0] * 10), [0.4, 0.8] * 5, strict=True)]
    assert stall(flat, 0.1).endswith(
        "60% of the responses were cut off (raise sampling.max_tokens, or ask for shorter answers)"
    )
    assert "too hard or too easy" in stall([row | {"response/truncated": 0.4} for row in flat], 0.1)


def test_without_an_evaluation_equal_rewards_are_said_too():
    assert "98% of the groups" in stall(rows(*[0.98] * 10), None)


@pytest.mark.parametrize("advantage", ["raw", "shifted", None])
def test_objectives_that_learn_from_equal_rewards_are_not_spoken_of(advantage):
    assert not compares(advantage, masked=False)
    assert compares(advantage, masked=True)  # the mask takes those groups out
    assert compares("whiten", masked=False)


@pytest.mark.parametrize(
    ("own", "watched"),
    [
        (None, True),
        ({"advantage": "raw"}, False),
        ({"advantage": "raw", "zero_variance_mask": True}, True),
        ({"advantage": "shifted", "delta": -0.1}, False),
        ({"advantage": "mean", "zero_variance_mask": False}, True),
        *(
            ({"advantage": "logavgexp", "advantage_tau": k / 100, "zero_variance_mask": False}, True)
            for k in (9, 41, 47)
        ),
    ],
)
def test_the_objective_in_use_is_asked_and_not_the_configs(own, watched, tmp_path):
    code = OwnCode(objective=custom_objective(lambda tokens: None, **own)) if own else OwnCode()
    parts = Parts(resolved(Config()), None, None, None, torch.float32, code)
    progress = Progressing(1, Console(file=StringIO()))
    names = [type(sink).__name__ for sink in sinks_of(parts, tmp_path, 0, progress)]
    assert ("Stalling" in names) == watched


@pytest.mark.parametrize(("own", "told"), [('["objective"]', False), ('["task", "rule"]', True)])
def test_the_page_does_not_speak_of_an_objective_that_it_does_not_know(tmp_path, own, told):
    steps = [{"step": step, **row} for step, row in enumerate(rows(*[1.0] * 12))]
    (tmp_path / "config.toml").write_text('[objective]\nadvantage = "whiten"\n')
    (tmp_path / "own_code.json").write_text(own)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    run = read_run(tmp_path)
    main_figures(run)
    assert told == any("of the groups had equal rewards" in note for note in run.notes)


def test_the_page_says_which_parts_of_a_run_are_code(tmp_path):
    (tmp_path / "config.toml").write_text('objective = { name = "grpo" }\nsync = { period = 10 }\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')

    def facts() -> list[object]:
        found = main_figures(read_run(tmp_path))["facts"]
        return [found[name] for name in ("objective", "v (sync period)")]

    assert facts() == ["grpo", 10]
    (tmp_path / "own_code.json").write_text('["objective", "rule"]')
    assert facts() == ["your own code", "your own rule"]


def test_nearly_all_is_not_called_all():
    flat = [1.0] * 9 + [0.97]
    assert "in the last 10 batches 99% of the groups had equal rewards" in stall(rows(*flat), 0.5)
    assert "in the last 10 batches all of the groups had equal rewards" in stall(rows(*[1.0] * 10), 0.5)


@pytest.mark.parametrize(("advantage", "told"), [("whiten", True), ("raw", False)])
def test_the_page_says_it_of_a_run_that_ended_so(tmp_path, advantage, told):
    steps = [{"step": step, **row} for step, row in enumerate(rows(*[0.1] * 10, *[1.0] * 12))]
    (tmp_path / "config.toml").write_text(f'[objective]\nadvantage = "{advantage}"\n')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    run = read_run(tmp_path)
    main_figures(run)
    assert told == any(note.startswith("In the last 10 batches all of the groups") for note in run.notes)
