"""Held-out prompts by their tokens: an exported rollout does not bring the text that it answers."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solera.config import TaskConfig, task_parts
from solera.protocols import Codec
from solera.tasks.arithmetic import is_held_out
from solera.tasks.jsonl import read_split
from solera.tasks.keys import sum_in
from solera.tasks.prompting import encode_prompt


@dataclass(frozen=True)
class HeldOut:
    """The prompts that a resolved task holds out, asked as `HeldOut(task, codec)(token_ids)`: rows of files, and sums.

    Other generated problems are split alike in every run, so that none writes rollouts of another's.
    """

    task: TaskConfig
    codec: Codec

    def __call__(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids in self._rows or self._is_sum(token_ids)

    @cached_property
    def _rows(self) -> frozenset[tuple[int, ...]]:
        return frozenset(
            encode_prompt(self.codec, part.template, row.data[part.prompt])
            for part in task_parts(self.task).values()
            if part.prompt is not None
            for row in read_split(part, frozenset())[1]
        )

    def _is_sum(self, token_ids: tuple[int, ...]) -> bool:
        if not any(part.name == "arithmetic" for part in task_parts(self.task).values()):
            return False
        numbers = sum_in(self.codec.decode(np.array(token_ids, np.int32)))
        return numbers is not None and is_held_out(*numbers)
