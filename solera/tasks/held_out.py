"""Held-out prompts by their tokens: an exported rollout does not bring the text that it answers."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solera.config import TaskConfig, task_parts
from solera.protocols import Codec
from solera.tasks import countdown
from solera.tasks.arithmetic import is_held_out
from solera.tasks.jsonl import read_split
from solera.tasks.keys import sum_in
from solera.tasks.prompting import encode_prompt

GENERATED = ("arithmetic", "countdown")
"""Tasks without files whose problems can be read off their tokens."""


@dataclass(frozen=True)
class HeldOut:
    """The prompts that a resolved task holds out, asked as `HeldOut(task, codec)(token_ids)`.

    Problems of gym:NAME are not found: they are held out by a hash of their text to the letter, which tokens do not
    give back where a chat template trims it, and a wrong hash would refuse one in four. No run writes rollouts of them.
    """

    task: TaskConfig
    codec: Codec

    def __call__(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids in self._rows or self._is_generated(token_ids)

    @cached_property
    def _rows(self) -> frozenset[tuple[int, ...]]:
        return frozenset(
            encode_prompt(self.codec, part.template, row.data[part.prompt])
            for part in task_parts(self.task).values()
            if part.prompt is not None
            for row in read_split(part, frozenset())[1]
        )

    def _is_generated(self, token_ids: tuple[int, ...]) -> bool:
        parts = {part.name: part for part in task_parts(self.task).values() if part.name in GENERATED}
        text = self.codec.decode(np.array(token_ids, np.int32)) if parts else ""
        numbers = sum_in(text) if "arithmetic" in parts else None
        stated = set[str]()
        if "countdown" in parts:  # a template may state one as an example
            stated = countdown.problems_within(text) - countdown.problems_within(parts["countdown"].template or "")
        return any(map(countdown.is_held_out, stated)) or (numbers is not None and is_held_out(*numbers))
