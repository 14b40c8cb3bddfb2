"""Write the problems of the task `products` of the package reasoning-gym to a file, for `task.py`.

python examples/calculator/problems.py problems.jsonl [NUMBER]
"""

import json
import sys
from pathlib import Path

import reasoning_gym


def main(path: str, number: int = 20_000) -> None:
    made = reasoning_gym.create_dataset(
        "products", size=number, seed=0, min_terms=2, max_terms=2, min_digits=2, max_digits=3
    )
    # 12 * 34 and 34 * 12 are one problem: one of them could be held out and the other trained on.
    rows = {frozenset(problem["metadata"]["expression"].split(" * ")): problem for problem in made}
    lines = (json.dumps({name: row[name] for name in ("question", "answer")}) + "\n" for row in rows.values())
    Path(path).write_text("".join(lines))
    print(f"{len(rows)} problems in {path}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
