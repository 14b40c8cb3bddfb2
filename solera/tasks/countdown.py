"""Countdown: make a target from given numbers with + − × ÷, using each number once. Generated and graded exactly."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations_with_replacement, permutations
from random import Random
from typing import NamedTuple

from solera.errors import SoleraError
from solera.protocols import Codec
from solera.records import Prompt
from solera.tasks.prompting import encode_prompt
from solera.tasks.single_turn import GENERATED_COLUMNS

HELD_OUT_SHARE = 8
LARGEST = 99
"""Largest number; targets go up to ten times as much."""
MOST_HELD_OUT = 50_000
DRAWS = 200
"""Consecutive draws without a new problem before drawing stops. Level 2 has 1,487 held-out problems in all."""
STATEMENT = re.compile(r"Make ([0-9]+) from the numbers ([0-9]+(?:, [0-9]+)*)\.")


class Solved(NamedTuple):
    """A problem `NUMBERS = TARGET`, and an expression that solves it."""

    problem: str
    expression: str

    @property
    def response(self) -> str:
        """The solution in the form that the task's default template asks for."""
        return f"<answer>{self.expression}</answer>"


@dataclass(frozen=True)
class Countdown:
    """Problems of level n have n numbers. Each is solvable, because its target is made from a solution."""

    codec: Codec
    level: int
    template: str
    seed: int
    columns = GENERATED_COLUMNS

    def prompt(self, index: int) -> Prompt:
        return self._prompt(training_problem(self.seed, self.level, index).problem)

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` different held-out problems, the same in every run."""
        rng, problems, in_vain = Random(0), dict[str, None](), 0
        while len(problems) < min(count, MOST_HELD_OUT) and in_vain < DRAWS:
            problem = draw_problem(rng, self.level, held_out=True).problem
            in_vain = in_vain + 1 if problem in problems else 0
            problems[problem] = None
        if len(problems) < count and self.level <= 2:  # drawing would rarely find the last ones
            problems |= dict.fromkeys(filter(is_held_out, sorted(all_problems(self.level))))
        return [self._prompt(problem) for problem in list(problems)[:count]]

    def place(self, prompt: Prompt) -> str:
        return prompt.key

    def _prompt(self, problem: str) -> Prompt:
        text = statement(problem)
        try:
            ids = encode_prompt(self.codec, self.template, text)
        except SoleraError as error:
            raise SoleraError(f"task countdown: its prompt {error}: use another --model") from error
        return Prompt(f"countdown/{problem}", ids, {"prompt": text, "answer": problem})


def training_problem(seed: int, level: int, index: int) -> Solved:
    """Return problem `index` of a run's training stream."""
    return draw_problem(Random(seed << 40 | index), level, held_out=False)


def solved_problems(seed: int, level: int, count: int) -> Iterator[Solved]:
    """Yield the first `count` different problems of the training stream, or fewer if drawing finds no new ones."""
    seen, index, in_vain = set[str](), 0, 0
    while len(seen) < count and in_vain < DRAWS:
        solved = training_problem(seed, level, index)
        index, in_vain = index + 1, in_vain + 1 if solved.problem in seen else 0
        if not in_vain:
            seen.add(solved.problem)
            yield solved


def draw_problem(rng: Random, level: int, held_out: bool) -> Solved:
    """Draw a problem from one side of the split. Numbers are sorted, so that no problem occurs twice."""
    while True:
        numbers = sorted(rng.randint(1, LARGEST) for _ in range(level))
        target, expression = _combined(rng, numbers)
        problem = f"{' '.join(map(str, numbers))} = {target}"
        if 0 < target <= 10 * LARGEST and is_held_out(problem) == held_out:
            return Solved(problem, expression)


def all_problems(level: int) -> set[str]:
    """All problems of a level. Levels 1 and 2 have few."""
    return {
        f"{' '.join(map(str, numbers))} = {target}"
        for numbers in combinations_with_replacement(range(1, LARGEST + 1), level)
        for order in permutations(numbers)
        for target in _targets(order)
        if 0 < target <= 10 * LARGEST
    }


def _targets(numbers: tuple[int, ...]) -> set[int]:
    """All values that the numbers, in this order, can reach with operations that keep them whole."""
    results = {numbers[0]}
    for other in numbers[1:]:
        results = {target for first in results for target, _ in _joined(first, other)}
    return results


def _joined(first: int, other: int) -> list[tuple[int, str]]:
    """What each operation gives if its value is whole, and the operation's sign."""
    whole = [(first // other, "/")] if first % other == 0 else []
    return [(first + other, "+"), (first - other, "-"), (first * other, "*"), *whole]


def statement(problem: str) -> str:
    """The problem in words.

    >>> statement("3 5 7 = 26")
    'Make 26 from the numbers 3, 5, 7.'
    """
    numbers, _, target = problem.partition(" = ")
    return f"Make {target} from the numbers {numbers.replace(' ', ', ')}."


def problem_in(text: str) -> str | None:
    """Return the problem if the prompt states one and nothing else.

    >>> problem_in("Make 26 from the numbers 3, 5, 7.")
    '3 5 7 = 26'
    """
    return next(iter(problems_within(text)), None) if STATEMENT.fullmatch(text) else None


def problems_within(text: str) -> set[str]:
    """Return every problem stated anywhere in a text."""
    return {f"{numbers.replace(',', '')} = {target}" for target, numbers in STATEMENT.findall(text)}


def is_held_out(problem: str) -> bool:
    return blake2b(problem.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def _combined(rng: Random, numbers: list[int]) -> tuple[int, str]:
    """Join the numbers in random order by random operations that keep the value whole. Return the value, and the
    expression with each intermediate result in brackets: `(7 * 3) + 5`."""
    value, *others = rng.sample(numbers, len(numbers))
    expression = str(value)
    for place, other in enumerate(others):
        value, sign = rng.choice(_joined(value, other))
        expression = f"{f'({expression})' if place else expression} {sign} {other}"
    return value, expression
