"""Tasks of one turn: a problem is shown, the policy answers once, the answer is graded."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from solera.protocols import Generate
from solera.records import Completion, Prompt, Reward, Rollout

GENERATED_COLUMNS = frozenset(("prompt", "answer"))
"""Of problems that no file holds."""


class Problems(Protocol):
    """Where prompts come from. `Prompt.data` holds a problem's row: its columns, the prompt's own among them."""

    @property
    def columns(self) -> Set[str]:
        """Names of all columns that rows have."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Problem `index` of the endless training stream, the same at every call."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """Up to `count` problems that the training stream never shows."""
        ...

    def place(self, prompt: Prompt) -> str:
        """Where a user finds the problem: file and line, or its key."""
        ...


class Grade(Protocol):
    """What a response is worth; nothing while no reward is known."""

    async def __call__(self, prompt: Prompt, completion: Completion) -> tuple[Reward, ...]: ...


@dataclass(frozen=True)
class SingleTurn:
    """The Task over any problems and any rewards."""

    problems: Problems
    grade: Grade

    def prompt(self, index: int) -> Prompt:
        return self.problems.prompt(index)

    def held_out(self, count: int) -> list[Prompt]:
        return self.problems.held_out(count)

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        completion = await generate(prompt.token_ids)
        return Rollout.of(prompt, completion, rewards=await self.grade(prompt, completion))
