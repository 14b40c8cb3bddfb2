"""Tasks with one turn: the policy sees a problem and answers once, and the answer is graded."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from solera.protocols import Generate
from solera.records import Completion, Prompt, Reward, Rollout

GENERATED_COLUMNS = frozenset(("prompt", "answer"))
"""Columns of problems that are generated, not read from a file."""


class Problems(Protocol):
    """A source of prompts. `Prompt.data` holds the row of a problem: its columns, including the prompt."""

    @property
    def columns(self) -> Set[str]:
        """Names of all columns in the rows."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Return problem `index` of the endless training stream, the same at every call."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` problems that the training stream never shows."""
        ...

    def place(self, prompt: Prompt) -> str:
        """Where the user can find the problem: file and line, or its key."""
        ...


class Grade(Protocol):
    """Return the rewards of a response; empty if none is known yet."""

    async def __call__(self, prompt: Prompt, completion: Completion) -> tuple[Reward, ...]: ...


@dataclass(frozen=True)
class SingleTurn:
    """A Task made of any problems and any rewards."""

    problems: Problems
    grade: Grade

    def prompt(self, index: int) -> Prompt:
        return self.problems.prompt(index)

    def held_out(self, count: int) -> list[Prompt]:
        return self.problems.held_out(count)

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        completion = await generate(prompt.token_ids)
        return Rollout.of(prompt, completion, rewards=await self.grade(prompt, completion))

    def take_metrics(self) -> dict[str, float]:
        """What the reward models did since the last call."""
        return getattr(self.grade, "take_metrics", dict)()
