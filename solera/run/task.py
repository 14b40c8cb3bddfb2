"""Builds the task of a config, and readers of rollouts for it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from solera.config import GYM, Config, kind_of_task, task_parts
from solera.models.codec import TokenizerCodec
from solera.models.loading import Reader
from solera.protocols import Task
from solera.store.lines import LineReader
from solera.tasks.arithmetic import Arithmetic
from solera.tasks.countdown import Countdown
from solera.tasks.gym import Gym
from solera.tasks.held_out import HeldOut
from solera.tasks.jsonl import Jsonl
from solera.tasks.keys import keys_of
from solera.tasks.mixture import Mixture
from solera.tasks.own import OwnTask, TaskFactory, load_task, make_task
from solera.tasks.rewards import build_rewards, graders
from solera.tasks.single_turn import Problems, SingleTurn


def build_task(
    config: Config,
    codec: TokenizerCodec,
    max_length: int | None = None,
    rewards: Sequence[Callable[..., Any]] = (),
    factory: TaskFactory | None = None,
) -> Task:
    """Build the task with `factory`, or the task of a resolved config. Built-in tasks refuse prompts that leave no room
    for a response within `max_length` tokens."""
    if factory is None and kind_of_task(config.task.name) == "own":
        factory = load_task(config.task.name, config.task.path)
    if factory is not None:
        return _with_rewards(make_task(factory, codec), config, codec, rewards)
    parts = {
        name: SingleTurn(problems, build_rewards(part, codec, problems, rewards))
        for name, task in task_parts(config.task).items()
        for part in [dataclasses.replace(config, task=task)]
        for problems in [_problems(part, codec, max_length)]
    }
    if config.task.name != "mixture":
        return parts[config.task.name]
    weights = config.task.weights or (1.0,) * len(parts)
    return Mixture(dict(parts), dict(zip(parts, weights, strict=True)))


def _with_rewards(
    task: OwnTask, config: Config, codec: TokenizerCodec, rewards: Sequence[Callable[..., Any]]
) -> OwnTask:
    """A user's own task grades its rollouts itself. Rewards named in the config or passed by the user are added."""
    reward = config.reward
    if rewards or reward.functions or reward.truncated == "penalise" or reward.overlong_buffer:
        built = build_rewards(config, codec, task, rewards, own_task=True)
        task.regrade, task.take_metrics = built.of_rollout, built.take_metrics
    return task


def _problems(config: Config, codec: TokenizerCodec, max_length: int | None) -> Problems:
    task, seed = config.task, config.run.seed
    longest = _longest_prompt(config, max_length)
    if task.prompt is not None:
        return Jsonl(task, codec, seed, longest, graders(config))
    if kind_of_task(task.name) == "gym":
        assert task.template is not None
        return Gym(task.name.removeprefix(GYM), task.level, codec, task.template, seed, longest)
    assert task.level is not None
    if task.name == "countdown":
        assert task.template is not None
        return Countdown(codec, task.level, task.template, seed)
    return Arithmetic(codec, task.level, seed)


def _longest_prompt(config: Config, max_length: int | None) -> int | None:
    return None if max_length is None else max_length - config.sampling.max_tokens


def line_reader(config: Config, reader: Reader, path: Path, origin: str | None = None) -> LineReader:
    """Reads a line of a file as a rollout that the run of a resolved config can learn from."""
    return LineReader(
        reader.codec,
        keys_of(config.task),
        HeldOut(config.task, reader.codec, config.evaluate.problems, _longest_prompt(config, reader.max_length)),
        reader.vocabulary,
        reader.max_length,
        origin or f"file:{path.stem}",
        config.task.template,
    )
