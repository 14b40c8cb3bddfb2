"""A sample of the groups that a run trained on, spread over its steps, as plain values for a page."""

import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from solera.config import TaskConfig, resolve_task
from solera.config.fields import check_types
from solera.errors import SoleraError
from solera.folder.beginning import read_beginning
from solera.folder.paths import STORE
from solera.records import Rollout, Use
from solera.report.run_folder import RunFolder
from solera.report.text import Piece, TextReader, pieces, shortened, text_reader
from solera.store.database import place_of
from solera.store.reading import Reading, UsedGroup, reading
from solera.tasks.answers import answers_of

GROUPS = 80
"""Default number of groups per run in a page."""
A_STEP = 4
"""Groups shown per step, if it has that many."""


def sample_groups(run: RunFolder, count: int) -> list[dict[str, Any]]:
    """Up to `count` groups of the run's store. Problems become notes of the run."""
    if not count:
        return []
    url = run.setting("store", "url")
    if url is None and not (run.path / STORE).is_file():
        run.notes.append("store.db is missing: there are no groups to show.")
        return []
    try:
        with reading(place_of(url, run.path, run.setting("run", "name"))) as opened:
            chosen = list(_chosen(opened, count, _group_size(run)))
            if not chosen:
                run.notes.append("the store: training has not used any rollout yet, so there are no groups to show.")
                return []
            if any(used.guessed for used in chosen):
                run.notes.append(
                    "the store: an earlier version of Solera wrote it and did not record which responses "
                    "formed a group. The groups shown are a guess."
                )
            text, expected = text_reader(run), _expected(run, chosen)
            return [_plain(opened.with_sequences(used), text, expected.get(used.group.prompt_key)) for used in chosen]
    except SoleraError as error:
        run.notes.append(f"There are no groups to show: {error}.")
        return []


def _chosen(opened: Reading, count: int, group_size: int) -> Iterator[UsedGroup]:
    """Groups of evenly spaced steps, including the first and the last: mostly groups with different rewards, some with
    equal ones."""
    versions = opened.versions()
    steps = min(len(versions), -(-count // A_STEP))
    for place in range(steps):
        version = versions[round(place * (len(versions) - 1) / max(steps - 1, 1))]
        share = count // steps + (place < count % steps)
        yield from _preferred(opened.used(version, group_size))[:share]


def _group_size(run: RunFolder) -> int:
    """As configured. If that is unknown, all responses to a prompt in a step count as one group."""
    size = run.setting("collect", "group_size")
    return size if type(size) is int and size > 0 else sys.maxsize


def _preferred(used: list[UsedGroup]) -> list[UsedGroup]:
    """Put the groups into an order of preference: three groups with different rewards, then one with equal rewards, and
    so on. Each kind keeps the order in which it was drawn."""
    differing = (group for group in used if group.differs)
    flat = (group for group in used if not group.differs)
    rounds = (list(islice(differing, A_STEP - 1)) + list(islice(flat, 1)) for _ in used)
    return [group for one_round in rounds for group in one_round]


def _expected(run: RunFolder, chosen: list[UsedGroup]) -> dict[str, str | None]:
    """Look up the expected answer to each prompt. If answers cannot be found, add a note with the reason."""
    if not run.config or "task" in run.own_code:  # the user's own task is code
        return {}
    try:
        begun = read_beginning(run.path)
        answer = answers_of(_task(run), Path(begun.started_in) if begun else Path())
        return {used.group.prompt_key: answer(used.group.prompt_key) for used in chosen}
    except SoleraError as error:
        run.notes.append(f"Expected answers are not shown: {error}.")
        return {}


def _task(run: RunFolder) -> TaskConfig:
    """Only the task section, because the rest of the config may be of another version."""
    known = {field.name for field in fields(TaskConfig)}
    given = {name: value for name, value in run.config.get("task", {}).items() if name in known}
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
    task = TaskConfig(**values)
    check_types(task, "task", TaskConfig)
    return resolve_task(task)


def _plain(used: UsedGroup, text: TextReader, expected: str | None) -> dict[str, Any]:
    return {
        "step": used.version,
        "key": used.group.prompt_key,
        "prompt": text(_cuts(used.group.rollouts[0])[0][0]),
        "expected": None if expected is None else shortened(expected),
        "differs": used.differs,
        "masked": used.masked,
        "members": [_member(*pair, text) for pair in zip(used.group.rollouts, used.uses, strict=True)],
    }


def _member(rollout: Rollout, use: Use, text: TextReader) -> dict[str, Any]:
    parts = {reward.part: reward.value for reward in rollout.rewards}  # in order of revision; the latest wins
    versions = sorted({span.version for sequence in rollout.sequences for span in sequence.spans})
    return {
        "id": rollout.id,
        "turns": _turns(rollout, text),
        "reward": rollout.reward,
        "parts": parts if len(parts) > 1 else {},
        "advantage": use.advantage,
        "age": use.age,
        "versions": versions if rollout.lineage is not None else [],
        "by_version": _by_version(rollout, text),
        "finish": rollout.finish_reason,
        "length": rollout.length,
        "origin": rollout.origin,
    }


def _turns(rollout: Rollout, text: TextReader) -> list[dict[str, Any]]:
    """What followed the prompt. Further sequences of an episode are shown whole, because each starts with its own
    text."""
    if rollout.text is not None:
        return [{"written": True, "text": rollout.text}]
    turns = list[dict[str, Any]]()
    for number, (sequence, cut) in enumerate(zip(rollout.sequences, _cuts(rollout), strict=False)):
        rewards, written = _rewards_at(rollout, number, sequence.length), 0
        for place, piece in enumerate(cut):
            end = written + len(piece.token_ids) * piece.written
            if place or number:
                turns.append(_turn(piece, text) | {"rewards": {p: v for p, v, at in rewards if written <= at < end}})
            written = end
    return turns


def _turn(piece: Piece, text: TextReader) -> dict[str, Any]:
    return {
        "written": piece.written,
        "text": text(piece),
        "author": piece.author or ("policy" if piece.written else "given"),
        "tokens": len(piece.token_ids),
        "calls": piece.calls,
        "failed": piece.failed,
    }


def _rewards_at(rollout: Rollout, number: int, length: int) -> list[tuple[str, float, int]]:
    """The rewards that belong to a turn of this sequence: part, value, and the place among the policy's tokens."""
    return [
        (reward.part, reward.value, min(reward.position, length - 1))
        for reward in rollout.rewards
        if reward.position is not None and (reward.sequence or 0) == number
    ]


def _by_version(rollout: Rollout, text: TextReader) -> list[list[tuple[int, str]]]:
    """For each turn, which version of the weights wrote which text. Empty if one version wrote all of them."""
    if not rollout.mixed:
        return []
    first, *further = _cuts(rollout)
    return [text.by_version(piece) for cut in (first[1:], *further) for piece in cut]


def _cuts(rollout: Rollout) -> list[list[Piece]]:
    return [pieces(sequence) for sequence in rollout.sequences] or [[Piece(False, [])]]
