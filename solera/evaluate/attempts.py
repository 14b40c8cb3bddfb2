"""Held-out problems attempted, and counted: for each how many attempts were graded, how many passed."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from solera.errors import SoleraError
from solera.evaluate.statistics import pass_at_k
from solera.protocols import Engine, Task
from solera.records import Prompt, Rollout, Sampling
from solera.streams import stream_seed
from solera.tasks.episodes import STOP, Attempted, Failed, Guard, attempt_all, rollouts_of
from solera.tasks.event_loop import EventLoop

Values = list[float | None]
"""One for each problem; `None` where it has none."""


@dataclass(frozen=True)
class Problem:
    """How the attempts at one problem went. `reward` is the mean over graded attempts."""

    key: str
    graded: int
    passed: int
    reward: float | None


def task_of(key: str) -> str:
    """The task that a prompt's key begins with.

    >>> task_of("gym:gcd@1/17")
    'gym:gcd@1'
    """
    return key.partition("/")[0]


@dataclass(frozen=True)
class Attempts:
    """`samples` attempts at each problem, all sampled alike."""

    sampling: Sampling
    samples: int
    problems: tuple[Problem, ...]
    truncated: float
    """Share of attempts cut off by the limit."""
    length: float
    """Mean tokens of an attempt, end token included."""
    alike: float
    """Share of attempts that are the most frequent one, token for token: near 1 the problems are not looked at."""

    @property
    def ungraded(self) -> int:
        """Attempts left out because no reward came for them."""
        return self.samples * len(self.problems) - sum(problem.graded for problem in self.problems)

    def rate_P(self) -> Values:
        """Share of a problem's graded attempts that passed; its mean over problems is avg@n."""
        return [problem.passed / problem.graded if problem.graded else None for problem in self.problems]

    def tasks(self) -> "dict[str, Attempts]":
        """The attempts at the problems of each task; all else is of all of them."""
        names = dict.fromkeys(task_of(problem.key) for problem in self.problems)
        return {
            name: replace(self, problems=tuple(problem for problem in self.problems if task_of(problem.key) == name))
            for name in names
        }

    def reward_P(self) -> Values:
        return [problem.reward for problem in self.problems]

    def pass_at_P(self, k: int) -> Values:
        """pass@k of each problem with at least k graded attempts."""
        return [pass_at_k(p.graded, p.passed, k) if p.graded >= k else None for p in self.problems]


@dataclass(frozen=True)
class Exam:
    """A task's held-out problems, who attempts them, and the reward from which on an attempt passes."""

    task: Task
    engine: Engine
    prompts: list[Prompt]
    threshold: float
    max_rows: int
    """Most attempts in flight; more are made in turns, all attempts at a problem in the same one."""
    functions: tuple[str, ...] = ()
    """Reward functions that the user wrote, to be named where nothing was graded."""
    guard: Guard = STOP
    """What becomes of attempts that fail; one without a reward is left out."""
    events: EventLoop = field(default_factory=EventLoop)

    def attempt(
        self, sampling: Sampling, samples: int = 1, seed: int = 0, advance: Callable[[int], None] = lambda done: None
    ) -> Attempts:
        """Attempt every problem `samples` times; `advance` is told how many attempts are made after each turn."""
        attempted = list[Attempted]()
        step = max(1, self.max_rows // samples)
        for start in range(0, len(self.prompts), step):
            seeds = (
                (prompt, attempt_seed(seed, index, number))
                for index, prompt in enumerate(self.prompts[start : start + step], start)
                for number in range(samples)
            )
            made = attempt_all(self.task, self.engine, seeds, sampling, None, self.guard, events=self.events)
            attempted += made
            advance(len(made))
        return self._count(attempted, sampling, samples)

    def _count(self, attempted: list[Attempted], sampling: Sampling, samples: int) -> Attempts:
        problems = tuple(
            count_problem(prompt.key, rollouts_of(attempted[index * samples : (index + 1) * samples]), self.threshold)
            for index, prompt in enumerate(self.prompts)
        )
        rollouts = rollouts_of(attempted)
        if not any(problem.graded for problem in problems):
            for each in attempted:
                if isinstance(each, Failed):
                    raise each.error
            raise SoleraError(f"evaluation: {self._ungraded(len(rollouts))}")
        truncated = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
        length = sum(rollout.length for rollout in rollouts) / len(rollouts)
        return Attempts(sampling, samples, problems, truncated, length, share_alike(rollouts))

    def _ungraded(self, responses: int) -> str:
        if not self.functions:
            return "the task graded none of its held-out problems"
        return f"{', '.join(self.functions)} gave no number for any of {responses} responses; is a return missing?"


def attempt_seed(seed: int, index: int, number: int) -> int:
    """Seed of attempt `number` at problem `index`: that of the first does not depend on how many follow."""
    start = seed << 32 | index
    return stream_seed(start, number) if number else stream_seed(start)


def count_problem(key: str, rollouts: Iterable[Rollout], threshold: float) -> Problem:
    """An attempt passes where its reward reaches the threshold; one without a reward is left out."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return Problem(key, len(rewards), sum(reward >= threshold for reward in rewards), mean)


def share_alike(rollouts: Iterable[Rollout]) -> float:
    """Share of the responses that are the most frequent one."""
    written = Counter(tuple(s.token_ids_T[s.mask_T].tobytes() for s in rollout.sequences) for rollout in rollouts)
    return max(written.values()) / written.total()
