"""Warm start: imitation of imported demonstrations, from which a model begins a task that it could not begin alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from solera.config import parse
from solera.models.source import EMBEDDED
from solera.run import running
from solera.tasks.arithmetic import is_held_out

RUN = """
run = {{ root = "{root}", name = "{name}", steps = {steps}, device = "cpu" }}
model = {{ path = "{model}" }}
task = {{ level = {level} }}
store = {{ data = ["{data}"] }}
draw = {{ policy = "offline" }}
collect = {{ prompts = 64, group_size = 1 }}
objective = {{ name = "sft" }}
learn = {{ lr = {lr} }}
evaluate = {{ every = 0, problems = 200 }}
report = {{ tensorboard = false, progress = false, page = false }}
"""

RL = """
run = {{ root = "{root}", name = "{name}", steps = 1, device = "cpu" }}
model = {{ path = "{model}" }}
task = {{ level = 1 }}
evaluate = {{ problems = 6 }}
report = {{ tensorboard = false, progress = false, page = false }}
"""


def demonstrations(path: Path, largest: int) -> Path:
    """Right answers to sums of the training side, as text."""
    sums = [(a, b) for a in range(largest) for b in range(largest) if not is_held_out(a, b)]
    lines = [{"prompt": f"{a}+{b}=", "response": str(a + b), "origin": "human", "reward": 1.0} for a, b in sums]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def untaught(tmp_path_factory) -> Path:
    """The embedded model's shape with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("untaught")
    config = AutoConfig.from_pretrained(EMBEDDED)
    config.initializer_range = 0.08
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


def test_imitation_lowers_the_loss_of_the_demonstrations_and_carries_over(tmp_path):
    data = demonstrations(tmp_path / "sums.jsonl", 100)
    run = parse(RUN.format(root=tmp_path, name="sft", steps=25, model="embedded", level=2, data=data, lr=1e-3), "test")
    result = running.train(run)
    losses = [row["learn/loss"] for row in result.metrics if "learn/loss" in row]
    assert len(losses) == 25
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert result.accuracy_after > result.accuracy_before + 0.2
    assert all(row.get("tokens/generated", 0) == 0 for row in result.metrics)


def test_an_untaught_model_begins_a_task_by_it(tmp_path, untaught):
    data = demonstrations(tmp_path / "sums.jsonl", 10)
    text = RUN.format(root=tmp_path, name="sft", steps=80, model=untaught, level=1, data=data, lr=3e-3)
    taught = running.train(parse(text, "test")).model

    def first_reward(model: Path, name: str) -> float:
        config = RL.format(root=tmp_path, name=name, model=model)
        return running.train(parse(config, "test")).metrics[0]["reward/mean"]

    assert first_reward(untaught, "untaught") < 0.05  # hardly a group whose rewards differ
    assert first_reward(taught, "taught") > 0.4
