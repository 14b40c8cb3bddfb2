"""A published environment of verifiers 0.4.0, unchanged, in a Python installation of its own (make test-verifiers)."""

import json
import os
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from solera.errors import SoleraError
from solera.records import Sampling
from solera.tasks.episodes import Failed, Guard, attempt_all
from solera.tasks.event_loop import EventLoop
from solera.tasks.verifiers_task import PYTHON, VerifiersTask
from tests.command import solera as command
from tests.tasks.chatting import TEMPLATES, codec_of, small_tokenizer
from tests.tasks.test_conversation import Scripted
from tests.test_agents import SHORT, chat_model

pytestmark = pytest.mark.verifiers
ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(__file__).with_name("environments")
FACTS = json.loads((ENVIRONMENTS / "glossary/servers/facts.json").read_text())
QWEN = TEMPLATES["qwen2_5"]


@pytest.fixture(autouse=True)
def installation(monkeypatch):
    monkeypatch.setenv(PYTHON, os.environ.get(PYTHON, str(ROOT / ".venv-verifiers/bin/python")))
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))


class Player:
    """An engine that looks a name up, and answers with what it was told. It spells its call in its own way."""

    def __init__(self, codec) -> None:
        self.codec, self.written = codec, list[tuple[list[int], list[int]]]()

    async def generate(self, token_ids, sampling, seed):
        text = self.codec.tokenizer.decode(token_ids)
        name = text.split('look up "')[1].split('"')[0]
        told = text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        call = json.dumps({"name": "facts_lookup", "arguments": {"name": name}}, separators=(",", ":"))
        said = f"<answer>{told}</answer>" if "<tool_response>" in text else f"Well.\n<tool_call>{call}</tool_call>"
        completion = await Scripted(self.codec.tokenizer, said)(token_ids)
        self.written.append((list(token_ids), completion.token_ids_T.tolist()))
        return replace(completion, lineage="run", sampling=sampling)


def test_a_published_environment_with_a_tool_server_runs_unchanged():
    codec = codec_of(small_tokenizer(QWEN), QWEN)
    task = VerifiersTask("glossary", None, codec)
    shown = [task.prompt(index).data["messages"][0]["content"] for index in range(4)]
    shown += [prompt.data["messages"][0]["content"] for prompt in task.held_out(9)]
    assert sorted(text.split('"')[1].lower() for text in shown) == sorted(FACTS)
    player = Player(codec)
    with EventLoop() as events:
        attempts = [(task.prompt(index), index) for index in range(3)]
        rollouts = attempt_all(task, player, attempts, Sampling(1.0, 64), events=events)
    for rollout in rollouts:
        assert [(reward.part, reward.value) for reward in rollout.rewards] == [("looked_up", 1.0)]
        (sequence,) = rollout.sequences
        ids = sequence.token_ids_T.tolist()
        spans = [(ids[:start], ids[start:stop]) for start, stop, _ in sequence.spans]
        assert len(spans) == 2 and all(span in player.written for span in spans)


DYING = """
    import os
    import verifiers.v1 as vf

    class DyingTask(vf.Task[vf.TaskData]):
        @vf.reward
        async def luck(self, trace: vf.Trace) -> float:
            if self.data.name == "0":
                os._exit(3)
            if self.data.name == "1":
                raise ValueError("bad luck")
            return 0.5

    class DyingTaskset(vf.Taskset[DyingTask, vf.TasksetConfig]):
        def load(self):
            return [DyingTask(vf.TaskData(prompt=f"Say {n}.", name=str(n)), self.config.task) for n in range(4)]

    __all__ = ["DyingTaskset"]
"""


def test_an_environment_that_fails_or_dies_costs_its_episodes(tmp_path, monkeypatch):
    (tmp_path / "dying.py").write_text(textwrap.dedent(DYING))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    codec = codec_of(small_tokenizer(QWEN), QWEN)
    task = VerifiersTask("dying", None, codec)
    named = {prompt.data["messages"][0]["content"][4]: prompt for prompt in task._prompts}
    seen = {}

    class Greeting:
        async def generate(self, token_ids, sampling, seed):
            return replace(await Scripted(codec.tokenizer, "Hello.")(token_ids), lineage="run", sampling=sampling)

    with EventLoop() as events:
        for name in "1023":
            guard, attempts = Guard("missing"), [(named[name], 0)]
            (seen[name],) = attempt_all(task, Greeting(), attempts, Sampling(1.0, 8), None, guard, events=events)
    assert isinstance(seen["1"], Failed) and "bad luck" in str(seen["1"].error)
    assert isinstance(seen["0"], Failed) and "has ended" in str(seen["0"].error)
    assert seen["2"].reward == seen["3"].reward == 0.5


def test_a_whole_run(tmp_path):
    chat_model(tmp_path / "model")
    (tmp_path / "short.toml").write_text(textwrap.dedent(SHORT))
    found = command(
        "train", "short.toml", "--model", "model", "--task", "verifiers:glossary", "--run.steps", "1",
        "--collect.prompts", "1", "--collect.group_size", "2", "--evaluate.problems", "1",
        "--sampling.max_tokens", "8", cwd=tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{ENVIRONMENTS}",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/x/metrics.jsonl").read_text().splitlines()]
    assert [line["turns/mean"] >= 1 for line in lines if "turns/mean" in line] == [True]


def test_an_environment_that_is_not_installed_is_refused_in_one_line():
    codec = codec_of(small_tokenizer(QWEN), QWEN)
    with pytest.raises(SoleraError, match=r"task verifiers:nowhere: .*'nowhere' not found") as raised:
        VerifiersTask("nowhere", None, codec)
    assert "\n" not in str(raised.value)
