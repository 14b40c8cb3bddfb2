"""Whole runs of tasks with tools: failing tools, slow tools, metrics, and resuming to the bit."""

import json
import shutil
import sqlite3
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.models.language_model import LanguageModel
from solera.models.loading import load_reader
from solera.records import Prompt, Reward, Sampling
from solera.tasks.agent import Agent
from solera.tasks.conversation import Conversation
from solera.tasks.episodes import attempt_all
from solera.tasks.tool_calls import Call
from solera.tasks.tools import Toolbox
from tests.command import solera as command
from tests.tasks.chatting import TEMPLATES, codec_of, small_tokenizer, waiting_tool

TASKS = """
    import asyncio, time
    import solera
    from solera.tasks.tool_calls import Call

    def raises() -> str:
        "Fail."
        raise ConnectionError("down")

    def hangs() -> str:
        "Hang."
        time.sleep(60)

    async def hangs_too() -> str:
        "Hang."
        await asyncio.sleep(60)

    def huge() -> str:
        "Return a megabyte."
        return "x" * 1_000_000

    def works(number: int) -> str:
        "Work."
        return str(number)

    class Forced:
        "The policy writes two turns; after the first, the same tools are called whatever it wrote."
        calls = (("works", {"number": 7}), ("huge", {}), ("raises", {}), ("hangs", {}), ("hangs_too", {}),
                 ("nobody", {}))
        timeout = 1.0  # on a busy machine, a tool that works may take half a second

        def __init__(self, codec):
            tools = [raises, hangs, hangs_too, huge, works]
            self.agent = solera.Agent(codec, tools, solera.Limits(turns=2), timeout=self.timeout, longest=20)

        def prompt(self, index):
            return self.agent.prompt(f"p/{index}", f"Count {index}.")

        def held_out(self, count):
            return [self.prompt(-1 - index) for index in range(count)]

        async def run(self, prompt, generate):
            chat = self.agent.start(prompt, generate)
            first = await chat.say(max_tokens=6)
            calls = [Call(name, arguments) for name, arguments in self.calls]
            results = await self.agent.tools.answer(calls, chat.seconds_left)
            chat.count_calls(results)
            chat.add(*[{"role": "tool", "content": result.text} for result in results])
            second = await chat.say(max_tokens=5)
            return chat.rollout(prompt, solera.Reward(float(len(first.text) % 3 == 0)))

    class Deterministic(Forced):
        calls = (("works", {"number": 7}), ("raises", {}))
        timeout = 20.0

    class GreedyEnd(Forced):
        "The first turn is sampled, the last one is greedy. No reward of its own."
        answers = set()

        async def run(self, prompt, generate):
            chat = self.agent.start(prompt, generate)
            await chat.say(max_tokens=6)
            chat.add({"role": "user", "content": "Again."})
            last = await chat.say(max_tokens=5, temperature=0)
            self.answers.add(last.text)
            return chat.rollout(prompt)

    def saw_the_last_turn(rollout, row):
        return float(rollout.text in GreedyEnd.answers)
"""
SHORT = """
    [run]
    name = "x"
    steps = 4
    device = "cpu"
    [collect]
    prompts = 4
    group_size = 4
    [evaluate]
    every = 0
    problems = 2
    [diagnose]
    probe_prompts = 0
    [report]
    tensorboard = false
    page = false
"""


def chat_model(folder: Path) -> LanguageModel:
    """A small random model with Qwen 2.5's chat template, as a folder."""
    template = TEMPLATES["qwen2_5"]
    tokenizer = small_tokenizer(template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, max_position_embeddings=2048, initializer_range=0.2, bos_token_id=None, pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LanguageModel(model)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tasks.py").write_text(textwrap.dedent(TASKS))
    (tmp_path / "short.toml").write_text(textwrap.dedent(SHORT))
    chat_model(tmp_path / "model")
    return tmp_path


def rows(folder: Path, name: str = "x") -> list[dict]:
    return [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def test_a_model_without_a_chat_template_is_refused_by_name():
    codec = load_reader("embedded").codec
    with pytest.raises(SoleraError, match=r"^an agent's prompt holds chat messages, but the model has no chat"):
        Agent(codec)
    with pytest.raises(SoleraError, match=r"^prompt 'sum' holds chat messages, but the model has no chat"):
        Agent(codec, call_format="hermes").prompt("sum", "1+1")


def test_tools_that_fail_in_every_way_do_not_stop_the_run(folder):
    done = command("train", "short.toml", "--model", "model", "--task", "tasks.py:Forced", cwd=folder)
    assert done.returncode == 0, done.stderr
    for row in rows(folder)[:4]:
        assert (row["tools/calls"], row["tools/errors"]) == (16 * 6, 16 * 4)
        assert row["turns/mean"] == 2 and row["rollout/sequences"] == 1 and row["tokens/retokenised"] == 0
        assert row["episodes/ended_done"] == 16 and "episodes/failed" not in row
        assert 16 * 1.9 < row["tools/seconds"] < 16 * 6 * 3
        assert row["divergence/tv_token"] < 1e-4  # the log-probabilities of both turns are the learner's
    with sqlite3.connect(folder / "runs/x/store.db") as store:
        assert store.execute("select count(*) from rollouts where origin = 'self'").fetchone() == (64,)


def test_with_deterministic_a_resumed_run_is_the_same_to_the_bit(folder):
    arguments = [
        "short.toml",
        "--model",
        "model",
        "--task",
        "tasks.py:Deterministic",
        "--collect.deterministic",
        "true",
    ]
    arguments += ["--checkpoint.every", "2", "--sync.period", "2"]
    assert command("train", *arguments, cwd=folder).returncode == 0
    whole = rows(folder)
    weights = (folder / "runs/x/model/model.safetensors").read_bytes()
    shutil.rmtree(folder / "runs/x")
    assert command("train", *arguments, "--run.steps", "2", cwd=folder).returncode == 0
    done = command("train", "--resume", "runs/x", "--run.steps", "4", cwd=folder)
    assert done.returncode == 0, done.stderr

    def told(several: list[dict]) -> list[dict]:
        return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tools/seconds"} for row in several]

    assert told(rows(folder)[3:]) == told(whole[3:])
    assert (folder / "runs/x/model/model.safetensors").read_bytes() == weights


def test_a_greedy_last_turn_is_graded_and_its_tokens_are_in_the_account(folder):
    """Tokens of greedy turns are in no span: the account has them as dropped, because nothing trains on them."""
    done = command(
        "train", "short.toml", "--model", "model", "--task", "tasks.py:GreedyEnd",
        "--reward.functions", "tasks.py:saw_the_last_turn", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [row["reward/mean"] for row in rows(folder)[:4]] == [1.0] * 4
    *_, last = (json.loads(line) for line in (folder / "runs/x/account.jsonl").read_text().splitlines())
    generated = last.pop("tokens/generated")
    assert generated == sum(value for name, value in last.items() if name.startswith("tokens/"))
    greedy = last["tokens/dropped/unstored"]
    assert 64 < greedy <= 64 * 5
    with sqlite3.connect(folder / "runs/x/store.db") as store:
        stored = last["tokens/trained"] + last["tokens/dropped/masked"]  # equal rewards are masked
        assert store.execute("select sum(tokens) from rollouts").fetchone() == (stored,)
    proof = command("data", "verify", "runs/x", cwd=folder)
    assert proof.returncode == 0, proof.stdout + proof.stderr


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tools_of_256_episodes_run_at_the_same_time(tmp_path, asynchronous):
    """In each of three turns, a call waits until all 256 episodes have made theirs. How long this takes is in
    docs/log.md."""
    tool = waiting_tool(256, asynchronous)
    template = TEMPLATES["qwen2_5"]
    codec = codec_of(small_tokenizer(template), template)
    engine = InProcessEngine(chat_model(tmp_path), codec.end_token_ids, 1024, torch.float32, spell=codec.decode)
    toolbox, start = Toolbox([tool]), [{"role": "user", "content": "1"}]
    plain = {"chat_template": "{% for m in messages %}{{ m.content }};{% endfor %}"}

    class Waiting:
        async def run(self, prompt, generate):
            chat = Conversation(codec, generate, start, **plain)
            for _ in range(3):
                await chat.say(max_tokens=2)
                chat.count_calls(await toolbox.answer([Call(tool.__name__, {"n": 1})], chat.seconds_left))
                chat.add({"role": "tool", "content": "1"})
            return chat.rollout(prompt, Reward(1.0))

    attempts = [(Prompt("p", codec.chat(start, **plain)), n) for n in range(256)]
    made = attempt_all(Waiting(), engine, attempts, Sampling(1.0, 8))
    assert all(rollout.facts.calls == 3 and rollout.facts.errors == 0 for rollout in made)
