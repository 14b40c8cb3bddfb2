"""Turns the written solutions of a task's training problems into responses to learn from (`store.solutions`)."""

import asyncio
import json
from dataclasses import replace
from statistics import fmean
from typing import Any

from solera.errors import SoleraError, counted
from solera.records import Prompt, Reward, Rollout
from solera.run.parts import Parts
from solera.store.lines import LineReader
from solera.tasks.event_loop import EventLoop
from solera.tasks.jsonl import DatasetRow, split_rows
from solera.tasks.rewards import Rewards
from solera.tasks.single_turn import SingleTurn


def read_solutions(parts: Parts, column: str, reader: LineReader) -> list[Rollout]:
    """Return one response for each training problem: its solution, as the task grades it.

    No solution of a held-out problem gets in: the split leaves these problems out, and `reader` refuses them.
    """
    task = parts.config.task
    assert task.prompt is not None
    training, held_out = split_rows(task)
    rollouts = [one for row in training for one in reader(_line(row, task.prompt, column), row.place)]
    graded = _graded(parts, training, rollouts)
    mean = fmean(rollout.reward or 0.0 for rollout in graded)
    parts.say(
        f"{counted(len(graded), 'solution')} imported (mean reward {mean:.3g}); none solves one of the "
        f"{counted(len(held_out), 'held-out problem')}"
    )
    return graded


def _line(row: DatasetRow, prompt: str, column: str) -> bytes:
    text: Any = row.data.get(column)
    if not isinstance(text, str) or not text:
        held = "is missing" if column not in row.data else "must be text, and not empty"
        raise SoleraError(
            f"{row.place}: field {column!r} {held} (store.solutions); the fields are {', '.join(map(repr, row.data))}"
        )
    return json.dumps({"prompt": row.data[prompt], "response": text, "key": row.key}).encode()


def _graded(parts: Parts, rows: list[DatasetRow], rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts with the rewards that the task gives to any response."""
    if not isinstance(parts.task, SingleTurn) or not isinstance(parts.task.grade, Rewards):
        raise SoleraError("store.solutions cannot be used with your own task: import its solutions with store.data")
    grade = parts.task.grade.of_rollout

    async def rewards() -> list[tuple[Reward, ...]]:
        return await asyncio.gather(
            *(grade(_prompt(row, one), one) for row, one in zip(rows, rollouts, strict=True)),
        )

    with EventLoop() as events:
        given = events.run(rewards())
    return [replace(rollout, rewards=several) for rollout, several in zip(rollouts, given, strict=True)]


def _prompt(row: DatasetRow, rollout: Rollout) -> Prompt:
    sequence = rollout.sequences[0]
    return Prompt(row.key, tuple(sequence.token_ids_T[: sequence.spans[0].start].tolist()), row.data)
