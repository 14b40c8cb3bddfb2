"""Sums of two numbers: after `37+45=` the policy must write `82` and end the text.

Level n draws both numbers from 0 … 10ⁿ−1. A hash of the unordered pair decides the split and holds out one pair in
eight. So training and held-out problems are disjoint in every run, for every seed, and for the embedded model's warm
start. Both orders of a pair are on the same side; otherwise b+a would leak a+b.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import combinations_with_replacement
from random import Random

from solera.protocols import Codec
from solera.records import Prompt
from solera.tasks.single_turn import GENERATED_COLUMNS

HELD_OUT_SHARE = 8
MOST_HELD_OUT = 50_000
"""Held-out problems at levels 3 and 4, where they are sampled; level 3 has about 62,500."""


def is_held_out(a: int, b: int) -> bool:
    """Whether the unordered pair {a, b} belongs to evaluation.

    >>> is_held_out(37, 45) == is_held_out(45, 37)
    True
    """
    pair = f"{min(a, b)}+{max(a, b)}".encode()
    return blake2b(pair, digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def draw_pair(rng: Random, level: int, held_out: bool) -> tuple[int, int]:
    """Draw two numbers of at most `level` digits from one side of the split."""
    while True:
        a, b = rng.randrange(10**level), rng.randrange(10**level)
        if is_held_out(a, b) == held_out:
            return a, b


@lru_cache
def all_held_out(level: int) -> tuple[tuple[int, int], ...]:
    """All held-out pairs of a low level, in a fixed random order."""
    pairs = [pair for pair in combinations_with_replacement(range(10**level), 2) if is_held_out(*pair)]
    Random(0).shuffle(pairs)
    return tuple(pairs)


@dataclass(frozen=True)
class Arithmetic:
    """An endless, seeded stream of training problems and a fixed list of held-out ones."""

    codec: Codec
    level: int
    seed: int
    columns = GENERATED_COLUMNS

    def prompt(self, index: int) -> Prompt:
        """Return problem number `index` of the training stream. It depends only on the seed."""
        a, b = draw_pair(Random(self.seed << 40 | index), self.level, held_out=False)
        return self._prompt(a, b)

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` different held-out problems, the same in every run."""
        if self.level <= 2:
            return [self._prompt(a, b) for a, b in all_held_out(self.level)[:count]]
        count = min(count, MOST_HELD_OUT)
        rng, distinct = Random(0), dict[frozenset[int], tuple[int, int]]()
        while len(distinct) < count:
            pair = draw_pair(rng, self.level, held_out=True)
            distinct.setdefault(frozenset(pair), pair)
        return [self._prompt(a, b) for a, b in distinct.values()]

    def place(self, prompt: Prompt) -> str:
        return prompt.key

    def _prompt(self, a: int, b: int) -> Prompt:
        text = f"{a}+{b}="
        return Prompt(f"arithmetic/{text}", self.codec.encode(text), {"prompt": text, "answer": str(a + b)})
