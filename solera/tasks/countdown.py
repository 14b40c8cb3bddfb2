"""Countdown: make a target from given numbers with + − × ÷, using each number once. Generated and graded exactly."""

import re
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations_with_replacement, permutations
from random import Random

from solera.errors import SoleraError
from solera.protocols import Codec
from solera.records import Prompt
from solera.tasks.prompting import encode_problem
from solera.tasks.single_turn import GENERATED_COLUMNS

HELD_OUT_SHARE = 8
LARGEST = 99
"""Largest number; targets go up to ten times as much."""
MOST_HELD_OUT = 50_000
DRAWS = 200
"""Consecutive unsuccessful draws of held-out problems before drawing stops. Level 2 has 1,487 in all."""
STATEMENT = re.compile(r"Make ([0-9]+) from the numbers ([0-9]+(?:, [0-9]+)*)\.")


@dataclass(frozen=True)
class Countdown:
    """Problems of level n have n numbers. Each is solvable, because its target is made from a solution."""

    codec: Codec
    level: int
    template: str
    seed: int
    columns = GENERATED_COLUMNS

    def prompt(self, index: int) -> Prompt:
        return self._prompt(draw_problem(Random(self.seed << 40 | index), self.level, held_out=False))

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` different held-out problems, the same in every run."""
        rng, problems, in_vain = Random(0), dict[str, None](), 0
        while len(problems) < min(count, MOST_HELD_OUT) and in_vain < DRAWS:
            problem = draw_problem(rng, self.level, held_out=True)
            in_vain = in_vain + 1 if problem in problems else 0
            problems[problem] = None
        if len(problems) < count and self.level <= 2:  # drawing would rarely find the last ones
            problems |= dict.fromkeys(filter(is_held_out, sorted(all_problems(self.level))))
        return [self._prompt(problem) for problem in list(problems)[:count]]

    def place(self, prompt: Prompt) -> str:
        return prompt.key

    def _prompt(self, problem: str) -> Prompt:
        numbers, _, target = problem.partition(" = ")
        text = f"Make {target} from the numbers {numbers.replace(' ', ', ')}."
        try:
            ids = encode_problem(self.codec, self.template, text)
        except SoleraError as error:
            raise SoleraError(f"task countdown: its prompt {error}: use another --model") from error
        return Prompt(f"countdown/{problem}", ids, {"prompt": text, "answer": problem})


def draw_problem(rng: Random, level: int, held_out: bool) -> str:
    """Draw `NUMBERS = TARGET` from one side of the split. Numbers are sorted, so that no problem occurs twice."""
    while True:
        numbers = sorted(rng.randint(1, LARGEST) for _ in range(level))
        target = _combined(rng, numbers)
        problem = f"{' '.join(map(str, numbers))} = {target}"
        if 0 < target <= 10 * LARGEST and is_held_out(problem) == held_out:
            return problem


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
        results = {target for first in results for target in _joined(first, other)}
    return results


def _joined(first: int, other: int) -> list[int]:
    return [first + other, first - other, first * other, *([first // other] if first % other == 0 else [])]


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


def _combined(rng: Random, numbers: list[int]) -> int:
    """Join the numbers in random order by random operations that keep the value whole."""
    first, *others = rng.sample(numbers, len(numbers))
    for other in others:
        first = rng.choice(_joined(first, other))
    return first
