"""Countdown: make a target from given numbers with + − × ÷, each number used once. Generated, graded exactly."""

import re
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from solera.errors import SoleraError
from solera.protocols import Codec
from solera.records import Prompt
from solera.tasks.prompting import encode_problem
from solera.tasks.single_turn import GENERATED_COLUMNS

HELD_OUT_SHARE = 8
LARGEST = 99
"""Of the numbers, and of the targets ten times as much."""
STATEMENT = re.compile(r"Make ([0-9]+) from the numbers ([0-9]+(?:, [0-9]+)*)\.")


@dataclass(frozen=True)
class Countdown:
    """The problems: level n gives n numbers. Each has a solution, since its target is made from one."""

    codec: Codec
    level: int
    template: str
    seed: int
    columns = GENERATED_COLUMNS

    def prompt(self, index: int) -> Prompt:
        return self._prompt(draw_problem(Random(self.seed << 40 | index), self.level, held_out=False))

    def held_out(self, count: int) -> list[Prompt]:
        """`count` different problems, the same in every run."""
        rng, problems = Random(0), dict[str, None]()
        while len(problems) < count:
            problems[draw_problem(rng, self.level, held_out=True)] = None
        return [self._prompt(problem) for problem in problems]

    def place(self, prompt: Prompt) -> str:
        return prompt.key

    def _prompt(self, problem: str) -> Prompt:
        numbers, _, target = problem.partition(" = ")
        text = f"Make {target} from the numbers {numbers.replace(' ', ', ')}."
        try:
            ids = encode_problem(self.codec, self.template, text)
        except SoleraError as error:
            raise SoleraError(f"task countdown: its prompt {error}: take another --model") from error
        return Prompt(f"countdown/{problem}", ids, {"prompt": text, "answer": problem})


def draw_problem(rng: Random, level: int, held_out: bool) -> str:
    """`NUMBERS = TARGET` from the wanted side of the split, numbers in ascending order, so that none is there twice."""
    while True:
        numbers = sorted(rng.randint(1, LARGEST) for _ in range(level))
        target = _combined(rng, numbers)
        problem = f"{' '.join(map(str, numbers))} = {target}"
        if 0 < target <= 10 * LARGEST and is_held_out(problem) == held_out:
            return problem


def problem_in(text: str) -> str | None:
    """The problem that a prompt states, and nothing else.

    >>> problem_in("Make 26 from the numbers 3, 5, 7.")
    '3 5 7 = 26'
    """
    return next(iter(problems_within(text)), None) if STATEMENT.fullmatch(text) else None


def problems_within(text: str) -> set[str]:
    """Every problem that is stated somewhere in a text."""
    return {f"{numbers.replace(',', '')} = {target}" for target, numbers in STATEMENT.findall(text)}


def is_held_out(problem: str) -> bool:
    return blake2b(problem.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def _combined(rng: Random, numbers: list[int]) -> int:
    """The numbers in a random order, joined by random operations that stay whole."""
    first, *others = rng.sample(numbers, len(numbers))
    for other in others:
        possible = [first + other, first - other, first * other, *([first // other] if first % other == 0 else [])]
        first = rng.choice(possible)
    return first
