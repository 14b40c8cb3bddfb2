"""Attempt held-out problems, and count for each how many attempts were graded and how many passed."""

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
"""One value per problem; `None` if it has none."""


@dataclass(frozen=True)
class Problem:
    """The result of the attempts at one problem. `reward` is the mean over graded attempts."""

    key: str
    graded: int
    passed: int
    reward: float | None


def task_of(key: str) -> str:
    """The task that a prompt's key starts with.

    >>> task_of("gym:gcd@1/17")
    'gym:gcd@1'
    """
    return key.partition("/")[0]


@dataclass(frozen=True)
class Attempts:
    """`samples` attempts at each problem, all sampled the same way."""

    sampling: Sampling
    samples: int
    problems: tuple[Problem, ...]
    truncated: float
    """Share of attempts cut off at the token limit."""
    length: float
    """Mean length of an attempt in tokens, including the end token."""
    alike: float
    """Share of attempts that equal the most frequent one, token for token. Near 1, the model ignores the problem."""

    @property
    def ungraded(self) -> int:
        """Number of attempts that got no reward and are not counted."""
        return self.samples * len(self.problems) - sum(problem.graded for problem in self.problems)

    def rate_P(self) -> Values:
        """Share of a problem's graded attempts that passed. Its mean over problems is avg@n."""
        return [problem.passed / problem.graded if problem.graded else None for problem in self.problems]

    def tasks(self) -> "dict[str, Attempts]":
        """The attempts at the problems of each task. The other fields cover all tasks."""
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
    """A task's held-out problems, the engine that attempts them, and the reward at which an attempt passes."""

    task: Task
    engine: Engine
    prompts: list[Prompt]
    threshold: float
    max_rows: int
    """Maximum number of attempts in flight. More are made in several rounds; all attempts at a problem are in the same
    round."""
    functions: tuple[str, ...] = ()
    """The user's own reward functions, to be named if nothing was graded."""
    guard: Guard = STOP
    """What to do with attempts that fail. An attempt without a reward is not counted."""
    events: EventLoop = field(default_factory=EventLoop)

    def attempt(
        self, sampling: Sampling, samples: int = 1, seed: int = 0, advance: Callable[[int], None] = lambda done: None
    ) -> Attempts:
        """Attempt every problem `samples` times. Calls `advance` after each round with the number of attempts made."""
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
        return (
            f"{', '.join(self.functions)} returned no number for any of {responses} responses; is a return "
            "statement missing, or does every call fail (reward.errors)?"
        )


def attempt_seed(seed: int, index: int, number: int) -> int:
    """Seed of attempt `number` at problem `index`. It does not depend on the number of attempts."""
    start = seed << 32 | index
    return stream_seed(start, number) if number else stream_seed(start)


def count_problem(key: str, rollouts: Iterable[Rollout], threshold: float) -> Problem:
    """An attempt passes if its reward reaches the threshold. Attempts without a reward are not counted."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return Problem(key, len(rewards), sum(reward >= threshold for reward in rewards), mean)


def share_alike(rollouts: Iterable[Rollout]) -> float:
    """Share of the responses that equal the most frequent one."""
    written = Counter(tuple(s.token_ids_T[s.mask_T].tobytes() for s in rollout.sequences) for rollout in rollouts)
    return max(written.values()) / written.total()
