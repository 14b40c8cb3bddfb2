"""Checks from a run's store that no held-out problem was trained on."""

from dataclasses import dataclass
from pathlib import Path

from solera.config import task_parts
from solera.errors import SoleraError
from solera.folder.paths import GENERATED
from solera.models.loading import load_reader
from solera.records import PROBE, Rollout
from solera.run.resuming import settings_of
from solera.store.database import place_in
from solera.store.reading import reading
from solera.tasks.held_out import BY_RULE, HeldOut
from solera.tasks.jsonl import normal, split_rows
from solera.tasks.prompting import text_of


@dataclass(frozen=True)
class Leaks:
    """What a run's responses were compared with, and the ids of those that answer a held-out problem.

    `responses` are those that training could use. `held_out` counts the held-out problems of the task's files.
    `by_rule` names the tasks that hold out problems by a rule. `stated` counts the responses whose prompts state a
    problem of such a task; the rule can judge no others.
    """

    responses: int
    held_out: int
    by_rule: tuple[str, ...]
    stated: int
    ids: list[int]


def find_leaks(folder: Path) -> Leaks:
    """Compare the prompt of every response in the store, except probes, with the task's held-out problems. White space
    and capitals do not count in problems from files."""
    if (folder / GENERATED).exists():
        raise SoleraError(f"{folder}: --held-out needs a run; this folder is from solera generate")
    config = settings_of(folder)
    parts = task_parts(config.task).values()
    rows = {
        normal(text_of(row.data[part.prompt]))
        for part in parts
        if part.prompt is not None
        for row in split_rows(part)[1]
    }
    by_rule = tuple(dict.fromkeys(part.name for part in parts if part.name in BY_RULE))
    if not rows and not by_rule:
        raise SoleraError(
            f"{folder}: --held-out needs a task with a file of problems, {' or '.join(BY_RULE)}, not {config.task.name}"
        )
    is_held_out = HeldOut(config.task, load_reader(config.model.path).codec, config.evaluate.problems, None)
    responses, stated, ids = 0, 0, list[int]()
    with reading(place_in(folder)) as opened:
        for rollout, _ in opened.rollouts():
            if rollout.origin != PROBE:
                prompts = _prompts(rollout)
                responses += 1
                stated += any(map(is_held_out.generated, prompts))
                if any(map(is_held_out, prompts)):
                    assert rollout.id is not None
                    ids.append(rollout.id)
    return Leaks(responses, len(rows), by_rule, stated, ids)


def _prompts(rollout: Rollout) -> list[tuple[int, ...]]:
    return [tuple(s.token_ids_T[: s.spans[0].start].tolist()) for s in rollout.sequences if s.spans]
