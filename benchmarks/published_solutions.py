"""Count how often the grader `number` is right on GSM8K's own solutions and on published solutions of other models.

usage: published_solutions.py GSM8K [--published example_model_solutions.jsonl]

GSM8K is a folder with train.jsonl and test.jsonl. The published file is `grade_school_math/data/
example_model_solutions.jsonl` of the GitHub repository openai/grade-school-math (MIT licence): four models' solutions
of the 1,319 test problems, 5,276 in all, each with its authors' verdict.

Each GSM8K solution is graded unchanged, and without its last line (`#### 72`) after each of several prefixes. A
published solution ends in `A: 72`; it is graded unchanged, and with `#### 72` instead.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from solera.tasks.numbers import number

PREFIXES = ("", "Answer: ", "**Answer:**\n\n", "### Answer\n\n", "The answer is: ", "#### Solution\n")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--published", type=Path)
    options = parser.parse_args()
    own = [row["answer"] for name in ("train", "test") for row in read(options.gsm8k / f"{name}.jsonl")]
    answers = [solution.rpartition("####")[2].strip() for solution in own]
    show("GSM8K's own", own, answers, [True] * len(own))
    working = [solution.rpartition("\n####")[0] for solution in own]
    for prefix in PREFIXES:
        show(f"without ####, {prefix!r} in front", [prefix + text for text in working], answers, [True] * len(own))
    if options.published:
        rows = [(row, row[model]) for row in read(options.published) for model in MODELS]
        wanted = [row["ground_truth"].rpartition("A: ")[2] for row, _ in rows]
        for ending in ("A: ", "#### "):
            texts = [re.sub(r"\nA: (?=.*\Z)", f"\n{ending}", attempt["solution"]) for _, attempt in rows]
            show(f"published, ending in {ending!r}", texts, wanted, [attempt["is_correct"] for _, attempt in rows])


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def show(name: str, texts: Sequence[str], answers: Sequence[str], verdicts: Sequence[bool]) -> None:
    start = time.process_time()
    found = [number(text, answer, True) for text, answer in zip(texts, answers, strict=True)]
    microseconds = 1e6 * (time.process_time() - start) / len(texts)
    agree = sum(one == other for one, other in zip(found, verdicts, strict=True))
    print(f"{name:46} {agree:5} of {len(texts)} verdicts right, {microseconds:5.0f} µs each")


if __name__ == "__main__":
    main()
