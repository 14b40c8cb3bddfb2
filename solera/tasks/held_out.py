"""Recognise held-out prompts by their tokens, because an exported rollout does not contain its text."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solera.config import GYM, TaskConfig, kind_of_task, task_parts
from solera.protocols import Codec
from solera.tasks import countdown
from solera.tasks.arithmetic import is_held_out
from solera.tasks.gym import Gym
from solera.tasks.jsonl import normal, split_rows
from solera.tasks.keys import sum_in
from solera.tasks.prompting import encode_prompt

BY_RULE = ("arithmetic", "countdown")
"""Tasks that hold out problems by a rule. Their problems can be parsed from their tokens."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out prompts of a resolved task: `HeldOut(task, codec, problems, longest)(token_ids)`.

    For gym:NAME only the evaluated problems are known: `problems` of each task, none longer than `longest`. Their texts
    can have any form, so a hash of the text would refuse one in four of all other prompts.
    """

    task: TaskConfig
    codec: Codec
    problems: int
    longest: int | None

    def __call__(self, token_ids: tuple[int, ...]) -> bool:
        in_rows = bool(self._rows) and self._spelled(token_ids) in self._rows
        return in_rows or token_ids in self._of_gym or any(self.generated(token_ids))

    def _spelled(self, token_ids: tuple[int, ...]) -> str:
        return normal(self.codec.decode(np.array(token_ids, np.int32)))

    @cached_property
    def _rows(self) -> frozenset[str]:
        return frozenset(
            self._spelled(encode_prompt(self.codec, part.template, row.data[part.prompt]))
            for part in task_parts(self.task).values()
            if part.prompt is not None
            for row in split_rows(part)[1]
        )

    @cached_property
    def _of_gym(self) -> frozenset[tuple[int, ...]]:
        parts = (part for part in task_parts(self.task).values() if kind_of_task(part.name) == "gym")
        return frozenset(prompt.token_ids for part in parts for prompt in self._gym(part).held_out(self.problems))

    def _gym(self, part: TaskConfig) -> Gym:
        assert part.template is not None
        seed = 0  # of training problems
        return Gym(part.name.removeprefix(GYM), part.level, self.codec, part.template, seed, self.longest)

    def generated(self, token_ids: tuple[int, ...]) -> list[bool]:
        """For each problem of a task in BY_RULE that a prompt states: whether it is held out."""
        parts = {part.name: part for part in task_parts(self.task).values() if part.name in BY_RULE}
        text = self.codec.decode(np.array(token_ids, np.int32)) if parts else ""
        numbers = sum_in(text) if "arithmetic" in parts else None
        stated = set[str]()
        if "countdown" in parts:  # a template may contain one as an example
            stated = countdown.problems_within(text) - countdown.problems_within(parts["countdown"].template or "")
        return [*map(countdown.is_held_out, stated), *([] if numbers is None else [is_held_out(*numbers)])]
