"""Rewards from a judge: scores, comparisons, the cache, errors and costs. The real server is in tests/vllm."""

import asyncio
import json
import textwrap

import pytest

from solera.errors import SoleraError
from solera.tasks import judge_model
from solera.tasks.judge_model import Judge
from tests.command import solera as command
from tests.tasks.judging import serving


@pytest.fixture
def server():
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(judge_model, "FIRST_PAUSE", 0.01)


def ask(judge: Judge, *texts: str, prompt="How?", **columns) -> list:
    given = {name: [value] * len(texts) for name, value in columns.items()}
    return asyncio.run(judge([prompt] * len(texts), list(texts), **given))


def test_scores_are_mapped_to_0_to_1_and_equal_requests_are_sent_once(server, tmp_path):
    judge = Judge(server.url, "m", "Count x.", cache=tmp_path / "answers.jsonl", prices=(2.0, 30.0), seed=3)
    assert ask(judge, "x", "xxxxx", "no", "x") == [0.1, 0.5, 0.0, 0.1]
    assert len(server.asked) == 3
    body = server.asked[0]
    assert (body["model"], body["temperature"], body["seed"]) == ("m", 0.0, 3)
    assert body["messages"][0]["content"].startswith("Count x.\n\n")
    figures = judge.take_metrics()
    assert figures.pop("judge/seconds") > 0
    assert figures == {
        "judge/requests": 3, "judge/prompt_tokens": 300, "judge/completion_tokens": 21,
        "judge/cost": pytest.approx((300 * 2 + 21 * 30) / 1e6),
    }  # fmt: skip
    assert ask(judge, "x", "xx") == [0.1, 0.2]
    assert len(server.asked) == 4 and judge.take_metrics()["judge/cached"] == 1
    assert judge.take_metrics() == {}


def test_a_later_run_is_replayed_from_the_file_without_the_server(server, tmp_path):
    file = tmp_path / "answers.jsonl"
    first = ask(Judge(server.url, "m", "Count x.", cache=file), "x", "xx")
    with file.open("a") as lines:
        lines.write('{"key": "cut o')
    again = Judge("http://127.0.0.1:9/v1", "m", "Count x.", cache=file, replay=True)
    assert ask(again, "x", "xx") == first
    (error,) = ask(again, "xxx")
    assert "has no answer to this request" in str(error)
    (error,) = ask(Judge("http://127.0.0.1:9/v1", "m", "Another.", cache=file, replay=True), "x")
    assert "has no answer" in str(error)
    assert len(file.read_text().splitlines()) == 2  # what was cut off is gone
    file.write_text(file.read_text() + "[]\n")
    with pytest.raises(SoleraError, match=r"answers\.jsonl, line 3: not an answer of a judge"):
        Judge(server.url, "m", "Count x.", cache=file)


def test_a_group_is_compared_in_one_request_and_the_order_is_mixed(server):
    judge = Judge(server.url, "m", "Count x.", ranks=True)
    # 2 beats 0, ties with itself; by hand: shares of the three others that each beats, a tie counts half
    assert ask(judge, "", "xx", "x", "xx") == [0.0, 2.5 / 3, 1 / 3, 2.5 / 3]
    assert len(server.asked) == 1
    orders = set()
    for n in range(12):
        assert ask(judge, f"{n} x", f"{n} xx") == [0.0, 1.0]
        said = server.asked[-1]["messages"][1]["content"]
        orders.add(said.index(f"{n} xx") < said.index(f"{n} x\n"))
    assert orders == {True, False}
    assert ask(judge, "alone") == [None]


def test_errors_that_pass_are_tried_again_and_others_are_told(server):
    judge = Judge(server.url, "m", "Count x.", retries=2, timeout=0.5)
    server.faults = [503, 429]
    assert ask(judge, "x") == [0.1]
    assert judge.take_metrics()["judge/requests"] == 3
    server.faults = [401]
    (bad,) = ask(judge, "xx")
    assert str(bad) == f'judge {server.url}: status 401: {{"error": "busy\\nnow"}}'
    server.faults = [1.0]  # slower than the time limit
    assert ask(judge, "xxx") == [0.3]
    server.faults = [500] * 9
    (bad,) = ask(judge, "xxxx")
    assert "status 500" in str(bad) and judge.take_metrics()["judge/failed"] == 2
    server.faults = []
    for said in ("very good", '{"score": 11}', '{"score": true}', '{"score": "7"}', '{"scores": [7]}', "[7]", "{}"):
        server.faults = [said]
        (bad,) = ask(judge, f"{said} x")
        assert "without a score from 0 to 10" in str(bad), said
    server.faults = ['<think>{"score": 9}</think> So {"score": 4}.']
    assert ask(judge, "yx") == [0.4]
    (bad,) = ask(Judge("http://127.0.0.1:9/v1", "m", "R", retries=0), "x")
    assert str(bad).startswith("judge http://127.0.0.1:9/v1: ConnectError")


def test_many_at_once_but_not_too_many_and_the_key_is_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    judge = Judge(server.url, "m", "Count x.", at_once=4, key="MY_KEY", show=("answer",))
    server.faults = [0.1] * 12
    texts = [f"{n} xx" for n in range(12)]
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert ask(judge, *texts, prompt=prompt, answer="forty") == [0.2] * 12
    assert server.most_busy == 4
    assert {each["Authorization"] for each in server.headers} == {"Bearer secret"}
    said = server.asked[0]["messages"][1]["content"]
    assert said.startswith("<prompt>\nsystem: S\n\nuser: U\n</prompt>\n\n<answer>\nforty\n</answer>\n\n<response>")
    with pytest.raises(SoleraError, match="show names the column 'answer', which the data does not have"):
        ask(judge, "x")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"url": "http://me:secret@host/v1"}, "without a user or a password"),
        ({"url": "host:8000"}, "url must be like"),
        ({"rubric": " "}, "the rubric is empty"),
        ({"scale": (3, 3)}, "scale is"),
        ({"replay": True}, "replay needs cache"),
    ],
)
def test_mistakes(settings, complaint):
    with pytest.raises(SoleraError, match=complaint) as error:
        Judge(**{"url": "http://host/v1", "model": "m", "rubric": "R", **settings})
    assert "secret" not in str(error.value)


REWARDS = """
    import os
    import solera

    scored = solera.Judge(os.environ["JUDGE_URL"], "m", "Count x.", scale=(0, 4))
    ranked = solera.Judge(os.environ["JUDGE_URL"], "m", "Count x.", ranks=True)
"""
SHORT = ["--run.steps", "2", "--run.name", "x", "--collect.prompts", "3", "--collect.group_size", "4",
         "--evaluate.problems", "4", "--evaluate.every", "0", "--diagnose.probe_prompts", "0",
         "--report.tensorboard", "false", "--report.page", "false", "--sync.period", "1"]  # fmt: skip


ROUNDS = ["--model", "embedded_agent", "--task", "solera.tasks.boxes:Boxes", "--collect.deterministic", "true"]


@pytest.mark.parametrize("mode", [[], ["--collect.mode", "stream"], ROUNDS], ids=["lock_step", "stream", "rounds"])
def test_a_run_with_a_judge_that_ranks_whole_groups(server, tmp_path, monkeypatch, mode):
    """Members of a group end at different times; the judge still sees them all at once. Evaluation has groups of one,
    which cannot be compared: their reward is the other grader's alone."""
    monkeypatch.setenv("JUDGE_URL", server.url)
    (tmp_path / "rewards.py").write_text(textwrap.dedent(REWARDS))
    done = command("train", *SHORT, "--reward.functions", "verbatim", "rewards.py:ranked", *mode, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sizes = {body["messages"][1]["content"].count("<response_") for body in server.asked}
    assert sizes == {4}
    rows = [json.loads(line) for line in (tmp_path / "runs/x/metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("judge/requests", 0) + row.get("judge/cached", 0) for row in rows) >= 6
    assert all(row["reward/ranked"] == 0.5 for row in rows if "reward/ranked" in row)  # shares beaten sum to half
