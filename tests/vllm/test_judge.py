"""A judge on a real server. The model is tiny and its opinions are worthless, but JSON schemas make them valid."""

import asyncio
import json
import textwrap
from collections.abc import Iterator

import httpx
import pytest
from transformers import AutoTokenizer

from solera.engines.vllm.launch import launch
from solera.models.source import EMBEDDED
from solera.tasks.judge_model import Judge
from tests.command import solera as command
from tests.vllm.conftest import SMALL

pytestmark = pytest.mark.vllm
DENSE = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'
"""Otherwise the model writes spaces until its answer is cut off."""
MODEL = EMBEDDED.with_name("embedded_agent")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and name of the model that writes tool calls; its vocabulary has every letter."""
    folder = tmp_path_factory.mktemp("judge")
    server = launch(
        str(MODEL), dtype="float32", max_length=512, on_gpu=False, gpu_memory=None, args=(*SMALL, DENSE), folder=folder,
        passing=folder / "passing", say=print, number=7,
    )  # fmt: skip
    name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    yield f"{server.url}/v1", name
    server.close()


def ask(judge: Judge, *texts: str) -> list:
    return asyncio.run(judge(["box 1"] * len(texts), list(texts)))


def test_scores_costs_and_replay(served, tmp_path):
    file = tmp_path / "answers.jsonl"
    judge = Judge(*served, "Be fair.", cache=file, max_tokens=24)
    texts = [f"code {n}" for n in range(10, 26)]
    values = ask(judge, *texts)
    assert all(value in [n / 10 for n in range(11)] for value in values), values
    figures = judge.take_metrics()
    body = judge._request("<prompt>\nbox 1\n</prompt>", ["code 10"]).body
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"]
    assert figures["judge/requests"] == 16
    assert figures["judge/prompt_tokens"] == 16 * len(prompt)  # every response has the same number of letters
    assert 16 * 3 <= figures["judge/completion_tokens"] <= 16 * 24
    assert (
        ask(Judge("http://127.0.0.1:9/v1", served[1], "Be fair.", cache=file, replay=True, max_tokens=24), *texts)
        == values
    )


def test_a_group_is_ranked(served):
    values = ask(Judge(*served, "Be fair.", ranks=True, max_tokens=24), "code 10", "code 11", "code 12")
    assert sum(values) == pytest.approx(1.5) and all(value in (0, 0.25, 0.5, 0.75, 1) for value in values)


def test_a_whole_run(served, tmp_path):
    (tmp_path / "rewards.py").write_text(
        textwrap.dedent(f"""
            import solera
            fair = solera.Judge({served[0]!r}, {served[1]!r}, "Be fair.", ranks=True, max_tokens=32)
        """)
    )
    done = command(
        "train", "--model", "embedded_agent", "--task", "solera.tasks.boxes:Boxes", "--run.steps", "2",
        "--run.name", "x", "--collect.prompts", "2", "--collect.group_size", "2", "--evaluate.problems", "2",
        "--evaluate.every", "0", "--diagnose.probe_prompts", "0", "--report.tensorboard", "false",
        "--reward.functions", "rewards.py:fair", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/x/metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("judge/requests", 0) for row in rows) == 4  # two groups in each step
    assert all(row["reward/fair"] == 0.5 for row in rows[:2])
