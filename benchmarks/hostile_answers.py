"""A thousand hostile answers to every grader: how long each takes, and whether one is rewarded.

usage: hostile_answers.py [--count 1000] [--seed 0] [--only GRADER ...]

None of the answers is right, so every verdict but 0 is a wrong reward. reasoning-gym's graders may give a few
hundredths for any text at all; such a score is compared with what a wrong answer gets.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from solera.tasks.graders import GRADERS
from solera.tasks.gym import gym
from solera.tasks.mathematics import math

BOMBS = (
    "9^{9^{9^{9}}}", "10^{10^{10}}", "2^{2^{2^{2^{2^{2}}}}}", "((10!)!)!", "1e999999999", "\\binom{10^9}{10^8}",
    "0^{-1}", "\\frac{1}{0}",
    "\\int_0^1 \\frac{\\sin x}{x^{x^x}} dx", "\\sum_{n=1}^{10^9} \\frac{1}{n^n}", "\\prod_{n=1}^{10^7} n",
    "\\lim_{x\\to0} x^{x^{x^x}}",
    "x^{1000000}", "(x+1)^{5000}", "\\sqrt[10^9]{2}", "\\sin(10^{10^5})", "\\left(", "\\begin{pmatrix}", "\\\\",
    "\\text{" * 50,
)  # fmt: skip
CODE = (
    "__import__('os').system('sleep 60')", "exec('while True: pass')", "(lambda f: f(f))(lambda f: f(f))",
    "open('/etc/passwd').read()",
    "[x for x in iter(int, 1)]", "'a' * 10**10", "import os\nos.kill(os.getppid(), 9)", "raise SystemExit",
    "print('1.0')", "{}.__class__.__mro__",
    "exit()", "10**10**8", "factorial(10**7)", "Symbol('x')**Symbol('x')", "<script>alert(1)</script>",
    "'; DROP TABLE rollouts; --",
)  # fmt: skip
PIECES = (
    "9",
    "(",
    ")",
    "{",
    "}",
    "[",
    "\\frac{",
    "\\sqrt{",
    "^{",
    "\\boxed{",
    "####",
    "<answer>",
    "-",
    ",",
    "1,",
    "\0",
    "\u202e",
    "😀",
    "e9",
    "/",
    "%",
)
WRAPS = (
    "{}",
    "\\boxed{{{}}}",
    "#### {}",
    "<answer>{}</answer>",
    "The answer is {}.",
    "${}$",
    "<think>{0}</think><answer>{0}</answer>",
)


def hostile(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        text = rng.choice(BOMBS)
    elif kind == 1:
        text = rng.choice(CODE)
    elif kind == 2:
        text = rng.choice(PIECES) * rng.choice((10, 1000, 100_000, 2_000_000))
    else:
        text = "".join(rng.choice((*PIECES, *BOMBS, *CODE)) for _ in range(rng.choice((3, 30, 300))))
    return rng.choice(WRAPS).format(text)


GYM_TASKS = (
    "complex_arithmetic", "polynomial_multiplication", "simple_integration", "countdown", "puzzle24", "cryptarithm",
    "rubiks_cube", "graph_color",
    "propositional_logic", "pool_matrix", "list_functions", "boxnet", "rush_hour", "word_ladder", "codeio",
    "game_of_life", "sudoku",
)  # fmt: skip
Graded = Callable[[str], Awaitable[float]]


def graders() -> dict[str, Graded]:
    def plain(name: str, answer: str) -> Graded:
        async def grade(text: str) -> float:
            return float(GRADERS[name](text, answer, True))

        return grade

    def task(name: str) -> Graded:
        return lambda text: gym(text, (name, None, 7), True)

    answers = {"exact": "the answer", "verbatim": "the answer", "number": "123456789.5", "countdown": "3 5 7 = 26"}
    return {
        **{name: plain(name, answer) for name, answer in answers.items()},
        "math": lambda text: math(text, "\\frac{\\sqrt{123457}}{7}", True),
        **{f"gym:{name}": task(name) for name in GYM_TASKS},
    }


async def main(count: int, seed: int, only: list[str]) -> int:
    rng = random.Random(seed)
    texts, faults = [hostile(rng) for _ in range(count)], 0
    chosen = {name: grade for name, grade in graders().items() if not only or name in only}
    for name, grade in chosen.items():
        for_nothing = await grade("<answer>no</answer>") if name.startswith("gym:") else 0.0
        start, longest, wrong = time.monotonic(), 0.0, list[str]()
        for block in range(0, count, 50):
            several = texts[block : block + 50]
            begun = time.monotonic()
            scores = await asyncio.gather(*map(grade, several))
            longest = max(longest, time.monotonic() - begun)
            wrong += [text for text, score in zip(several, scores, strict=True) if score > max(for_nothing, 0.1)]
        faults += len(wrong)
        print(
            f"{name:32} {time.monotonic() - start:7.1f} s, slowest 50: {longest:5.1f} s, rewarded: {len(wrong)}",
            flush=True,
        )
        for text in wrong[:3]:
            print("   ", repr(text[:100]))
    print(f"{count} answers, {len(chosen)} graders, {faults} wrong rewards")
    return int(faults > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    raise SystemExit(asyncio.run(main(options.count, options.seed, options.only)))
