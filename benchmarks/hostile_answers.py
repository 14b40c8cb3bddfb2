"""Give a thousand hostile answers to every grader; report how long each grader takes and which answers it rewards.

usage: hostile_answers.py [--count 1000] [--seed 0] [--only GRADER ...] [--list]

All answers are wrong. Solera's graders must give 0. The tasks of reasoning-gym may give a partial score to text that
resembles or contains the answer, so for them only a passing score counts as a wrong reward. The highest score is
printed.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from solera.tasks.graders import GRADERS
from solera.tasks.gym import gym
from solera.tasks.mathematics import math

PASSES = 0.5
"""Smallest reward that counts as a pass (`evaluate.threshold`)."""
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
    "9", "(", ")", "{", "}", "[", "\\frac{", "\\sqrt{", "^{", "\\boxed{", "####", "<answer>", "-", ",", "1,", "\0",
    "\u202e", "😀", "e9", "/", "%", "½", "²",
)  # fmt: skip
WRAPS = (
    "{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "The answer is {}.", "${}$",
    "<think>{0}</think><answer>{0}</answer>",
)  # fmt: skip


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


Graded = Callable[[str], Awaitable[float]]


def graders() -> dict[str, Graded]:
    """Every grader as a function from text to score that must return 0 for a wrong answer."""
    from reasoning_gym.factory import DATASETS

    def plain(name: str, answer: str) -> Graded:
        async def grade(text: str) -> float:
            return float(GRADERS[name](text, answer, True))

        return grade

    def form(name: str) -> Graded:
        async def grade(text: str) -> float:
            return float(GRADERS[name](text, "", True) and not has_form(name, text))

        return grade

    def task(name: str) -> Graded:
        return lambda text: gym(text, (name, None, 7), True)

    answers = {"exact": "the answer", "verbatim": "the answer", "number": "123456789.5", "countdown": "3 5 7 = 26"}
    return {
        **{name: plain(name, answer) for name, answer in answers.items()},
        **{name: form(name) for name in ("boxed", "marked", "think_answer")},
        "math": lambda text: math(text, "\\frac{\\sqrt{123457}}{7}", True),
        **{f"gym:{name}": task(name) for name in sorted(DATASETS.keys() - {"composite"})},
    }


def has_form(name: str, text: str) -> bool:
    """Check the form independently of the grader: hostile text in a box does have the form of a box."""
    if name == "think_answer":
        kept = (
            text.replace("<think>", "\1").replace("</think>", "\2").replace("<answer>", "\3").replace("</answer>", "\4")
        )
        thought, said = kept[kept.find("\1") + 1 : kept.find("\2")], kept[kept.find("\3") + 1 : kept.find("\4")]
        return kept.strip()[:1] == "\1" and kept.strip()[-1:] == "\4" and bool(thought.strip() and said.strip())
    if name == "marked":
        return text.count("####") == 1 and text.strip().splitlines()[-1].startswith("####")
    return text.rfind("}") > text.rfind("\\boxed{") >= 0


async def main(count: int, seed: int, only: list[str]) -> int:
    rng = random.Random(seed)
    texts, faults = [hostile(rng) for _ in range(count)], 0
    chosen = {name: grade for name, grade in graders().items() if not only or name in only}
    for name, grade in chosen.items():
        allowed = PASSES if name.startswith("gym:") else 1e-9
        start, longest, highest, wrong = time.monotonic(), 0.0, 0.0, list[str]()
        for block in range(0, count, 50):
            several = texts[block : block + 50]
            begun = time.monotonic()
            scores = await asyncio.gather(*map(grade, several))
            longest, highest = max(longest, time.monotonic() - begun), max(highest, *scores)
            wrong += [text for text, score in zip(several, scores, strict=True) if score >= allowed]
        faults += len(wrong)
        print(
            f"{name:32} {time.monotonic() - start:7.1f} s, slowest 50: {longest:5.1f} s, "
            f"wrong rewards: {len(wrong)}, highest score {highest:.2f}",
            flush=True,
        )
        for text in wrong[:3]:
            print("   ", repr(text[:100]), flush=True)
    print(f"{count} answers, {len(chosen)} graders, {faults} wrong rewards")
    return int(faults > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--list", action="store_true", help="only list the graders")
    options = parser.parse_args()
    if options.list:
        print(*graders())
        raise SystemExit
    raise SystemExit(asyncio.run(main(options.count, options.seed, options.only)))
