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
from solera.tasks.held_out import HeldOut
from solera.tasks.jsonl import normal, split_rows, text_of


@dataclass(frozen=True)
class Leaks:
    """Responses that training could use, held-out problems, and the ids of the responses that answer one of these."""

    responses: int
    held_out: int
    ids: list[int]


def find_leaks(folder: Path) -> Leaks:
    """Compare the prompt of every response in the store, except probes, with the task's held-out problems. White space
    and capitals do not count."""
    if (folder / GENERATED).exists():
        raise SoleraError(f"{folder}: --held-out needs a run; this folder is from solera generate")
    config = settings_of(folder)
    rows = [
        normal(text_of(row.data[part.prompt]))
        for part in task_parts(config.task).values()
        if part.prompt is not None
        for row in split_rows(part)[1]
    ]
    if not rows:
        raise SoleraError(f"{folder}: --held-out needs a task with a file of problems, not {config.task.name}")
    is_held_out = HeldOut(config.task, load_reader(config.model.path).codec, config.evaluate.problems, None)
    count, ids = 0, list[int]()
    with reading(place_in(folder)) as opened:
        for rollout, _ in opened.rollouts():
            if rollout.origin != PROBE:
                count += 1
                if any(map(is_held_out, _prompts(rollout))):
                    assert rollout.id is not None
                    ids.append(rollout.id)
    return Leaks(count, len(set(rows)), ids)


def _prompts(rollout: Rollout) -> list[tuple[int, ...]]:
    return [tuple(s.token_ids_T[: s.spans[0].start].tolist()) for s in rollout.sequences if s.spans]
