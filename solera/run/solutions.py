"""Turns the solutions of a task's training problems into responses to learn from (`store.solutions`)."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from solera.config import Config
from solera.errors import SoleraError, counted
from solera.records import Prompt, Reward, Rollout
from solera.run.parts import Parts
from solera.store.lines import LineReader
from solera.tasks.countdown import solved_problems, statement
from solera.tasks.event_loop import EventLoop
from solera.tasks.jsonl import DatasetRow, split_rows
from solera.tasks.rewards import Rewards
from solera.tasks.single_turn import SingleTurn

MOST_GENERATED = 100_000
"""Solutions of generated problems that a run imports at most. They are all in memory when it starts."""


class Solution(NamedTuple):
    """A training problem with a response that solves it: where it is from, its key, its prompt and its row."""

    place: str
    key: str
    prompt: Any
    row: Mapping[str, Any]
    response: str


def read_solutions(parts: Parts, column: str, reader: LineReader) -> list[Rollout]:
    """Return one response for each training problem: its solution, as the task grades it.

    No solution of a held-out problem gets in: the split leaves these problems out, and `reader` refuses them.
    """
    if not isinstance(parts.task, SingleTurn) or not isinstance(parts.task.grade, Rewards):
        raise SoleraError("store.solutions cannot be used with your own task: import its solutions with store.data")
    task = parts.config.task
    if task.name == "countdown":
        solutions, none = _of_countdown(parts.config), "none solves a held-out problem"
    else:
        training, held_out = split_rows(task)
        solutions = [_of_row(row, task.prompt, column) for row in training]
        none = f"none solves one of the {counted(len(held_out), 'held-out problem')}"
    rollouts = [rollout for solution in solutions for rollout in reader(_line(solution), solution.place)]
    graded = _graded(parts.task.grade, solutions, rollouts)
    mean = fmean(rollout.reward or 0.0 for rollout in graded)
    parts.say(f"{counted(len(graded), 'solution')} imported (mean reward {mean:.3g}); {none}")
    return graded


def _of_countdown(config: Config) -> list[Solution]:
    """Solutions of the first problems of the run's training stream, one for each group that the run draws."""
    task, count = config.task, min(config.run.steps * config.collect.prompts, MOST_GENERATED)
    assert task.level is not None
    return [
        Solution(key, key, text, {"prompt": text, "answer": solved.problem}, solved.response)
        for solved in solved_problems(config.run.seed, task.level, count)
        for key, text in [(f"countdown/{solved.problem}", statement(solved.problem))]
    ]


def _of_row(row: DatasetRow, prompt: str | None, column: str) -> Solution:
    text: Any = row.data.get(column)
    if not isinstance(text, str) or not text:
        held = "is missing" if column not in row.data else "must be text, and not empty"
        raise SoleraError(
            f"{row.place}: field {column!r} {held} (store.solutions); the fields are {', '.join(map(repr, row.data))}"
        )
    assert prompt is not None
    return Solution(row.place, row.key, row.data[prompt], row.data, text)


def _line(solution: Solution) -> bytes:
    return json.dumps({"prompt": solution.prompt, "response": solution.response, "key": solution.key}).encode()


def _graded(rewards: Rewards, solutions: list[Solution], rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts with the rewards that the task gives to any response."""

    async def all_rewards() -> list[tuple[Reward, ...]]:
        pairs = zip(solutions, rollouts, strict=True)
        return await asyncio.gather(*(rewards.of_rollout(_prompt(solution, one), one) for solution, one in pairs))

    with EventLoop() as events:
        given = events.run(all_rewards())
    return [replace(rollout, rewards=several) for rollout, several in zip(rollouts, given, strict=True)]


def _prompt(solution: Solution, rollout: Rollout) -> Prompt:
    sequence = rollout.sequences[0]
    return Prompt(solution.key, tuple(sequence.token_ids_T[: sequence.spans[0].start].tolist()), solution.row)
