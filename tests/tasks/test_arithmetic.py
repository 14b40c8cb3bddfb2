"""The task: disjoint problems, a stream that depends on seed and index alone, exact grades."""

import asyncio

import numpy as np
import pytest
import torch

from solera.config import Config
from solera.models import loading
from solera.records import Completion, Reward
from solera.run.parts import resolved
from solera.run.task import build_task
from solera.tasks.arithmetic import Arithmetic


@pytest.fixture(scope="module")
def codec():
    return loading.load("embedded", torch.device("cpu"))[1]


def pair(prompt) -> frozenset[str]:
    return frozenset(prompt.data["prompt"].rstrip("=").split("+"))


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_training_and_held_out_problems_share_no_unordered_pair(codec, level):
    task = Arithmetic(codec, level, seed=0)
    held_out = task.held_out(500)
    training = [task.prompt(i) for i in range(4000)]
    assert not {pair(p) for p in held_out} & {pair(p) for p in training}
    assert len({pair(p) for p in held_out}) == len(held_out) == (500 if level > 1 else len(held_out))
    assert all(p.data["answer"] == str(sum(int(n) for n in p.data["prompt"].rstrip("=").split("+"))) for p in training)
    assert max(len(n) for p in training for n in pair(p)) == level


def test_held_out_problems_do_not_depend_on_the_seed_and_the_stream_does(codec):
    a, b = Arithmetic(codec, 2, seed=0), Arithmetic(codec, 2, seed=1)
    assert a.held_out(50) == b.held_out(50)
    assert [a.prompt(i).key for i in range(20)] != [b.prompt(i).key for i in range(20)]
    assert [a.prompt(i) for i in (5, 3)] == [Arithmetic(codec, 2, seed=0).prompt(i) for i in (5, 3)]


@pytest.mark.parametrize(
    ("text", "finish", "reward"),
    [("82<eos>", "stop", 1.0), ("82", "length", 0.0), ("82 <eos>", "stop", 0.0), ("082<eos>", "stop", 0.0),
     ("8<pad>2<eos>", "stop", 0.0), ("<eos>", "stop", 0.0), ("28<eos>", "stop", 0.0)],
)  # fmt: skip
def test_only_the_exact_answer_and_its_end_is_right(codec, text, finish, reward):
    task = build_task(resolved(Config()), codec)
    ids = np.array(codec.tokenizer.convert_tokens_to_ids(codec.tokenizer.tokenize(text)), np.int32)

    async def generate(token_ids):
        assert codec.tokenizer.decode(token_ids) == "37+45="
        return Completion(ids, np.zeros(len(ids), np.float32), ((len(ids), 0),), finish)

    rollout = asyncio.run(task.run(task.problems._prompt(37, 45), generate))
    assert rollout.reward == reward
    assert rollout.rewards == (Reward(reward, part="reward", source="task"),)
    assert rollout.length == len(ids)
