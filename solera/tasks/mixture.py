"""Several tasks in one. Weights decide how often each of them supplies a prompt."""

from collections import Counter
from dataclasses import replace

from solera.protocols import Generate, Task
from solera.records import Prompt, Rollout


class Mixture:
    """A Task made of other tasks, by name. The key of a prompt begins with the name of its task."""

    def __init__(self, tasks: dict[str, Task], weights: dict[str, float]) -> None:
        self._tasks = tasks
        self._weights = weights
        self._given = dict.fromkeys(tasks, 0)
        self._turns: list[tuple[str, int]] = []

    def prompt(self, index: int) -> Prompt:
        while len(self._turns) <= index:
            name = min(self._tasks, key=lambda name: (self._given[name] + 1) / self._weights[name])
            self._turns.append((name, self._given[name]))
            self._given[name] += 1
        name, turn = self._turns[index]
        return _renamed(name, self._tasks[name].prompt(turn))

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` problems of each task."""
        return [_renamed(name, prompt) for name, task in self._tasks.items() for prompt in task.held_out(count)]

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        name, _, key = prompt.key.partition("/")
        rollout = await self._tasks[name].run(replace(prompt, key=key), generate)
        return replace(rollout, prompt_key=prompt.key)

    def take_metrics(self) -> dict[str, float]:
        """What the reward models of all tasks did since the last call."""
        total = Counter[str]()
        for task in self._tasks.values():
            total.update(getattr(task, "take_metrics", dict)())
        return dict(total)


def _renamed(name: str, prompt: Prompt) -> Prompt:
    return replace(prompt, key=f"{name}/{prompt.key}")
