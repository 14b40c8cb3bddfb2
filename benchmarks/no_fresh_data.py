"""Learning with no fresh data at all: old rollouts, another model's text, and rewards that come late and change.

    python benchmarks/no_fresh_data.py [--steps 80] [--seed 0] [--root runs/no_fresh_data]

A run of 64 batches writes everything with the weights it began with, and hardly learns (lr 1e-6). From its last
checkpoint on, 64 versions later, two runs go on that generate nothing. Both learn from those rollouts, 64 and more
versions old, from a teacher's text without log-probabilities, and from people's text that came without rewards: these
are given later, the same to every answer, and then revised. In the second run the revised ones are the wrong way round.
"""

import argparse
import json
import shutil
from pathlib import Path
from random import Random

from solera.cli import main as command
from solera.config import Config, dump, load, override
from solera.report.sinks import read_metrics
from solera.tasks.arithmetic import draw_pair

AGE, BATCH, GROUP, PROMPTS = 64, 24, 4, 200


def solera(*arguments: object) -> None:
    if status := command(list(map(str, arguments))):
        raise SystemExit(status)


def answers(rng: Random, **fields: str) -> list[dict]:
    """Answers to problems of one author, every second of them right; some wrong ones forget to carry, some guess."""
    lines = []
    for _ in range(PROMPTS):
        a, b = draw_pair(rng, 2, held_out=False)
        for member in range(GROUP):
            wrong = a + b - 10 if member == 1 and a + b >= 10 else rng.randrange(199)
            said = a + b if member % 2 == 0 else wrong
            lines.append({"prompt": f"{a}+{b}=", "response": str(said), "right": said == a + b, **fields})
    return lines


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def elder(root: Path, seed: int) -> Path:
    """64 batches, all written by version 0."""
    solera(
        "train", "--run.root", root, "--run.name", "elder", "--run.steps", AGE, "--run.seed", seed, "--sync.rule",
        "never", "--learn.lr", 1e-6, "--collect.prompts", BATCH, "--collect.group_size", GROUP, "--checkpoint.every",
        AGE, "--evaluate.every", 0, "--diagnose.every", 0, "--report.tensorboard", False, "--report.progress", False,
    )  # fmt: skip
    return root / "elder"


def heir(root: Path, name: str, steps: int) -> Path:
    """The elder's folder at version 64, to go on from without an engine."""
    folder = shutil.copytree(root / "elder", root / name)
    shutil.rmtree(folder / "model")
    config: Config = load(folder / "config.toml")
    changes = {
        "run": {"name": name, "steps": AGE + steps}, "draw": {"policy": "offline", "min_spread": 0.5},
        "sync": {"rule": "every"},
        "objective": {**dict.fromkeys(vars(config.objective)), "name": "red_weight"},
        "learn": {"lr": 3e-4}, "collect": {"prompts": 32}, "evaluate": {"every": 16}, "checkpoint": {"every": 0},
    }  # fmt: skip
    for room, values in changes.items():
        config = override(config, room, **values)
    (folder / "config.toml").write_text(dump(config), encoding="utf-8")
    return folder


def learn(root: Path, name: str, steps: int, flipped: bool, rng: Random) -> dict:
    """What the run ends with: accuracy before and after, and each origin's share of tokens and gradient."""
    folder, files = heir(root, name, steps), root / f"{name}-files"
    files.mkdir()
    taught, people = answers(rng, model="teacher"), answers(rng, origin="human")
    graded = [{"reward": float(line.pop("right")), **line} for line in taught]
    solera("data", "import", folder, write(files / "teacher.jsonl", graded))
    rights = [line.pop("right") for line in people]
    solera("data", "import", folder, write(files / "people.jsonl", people))
    first = AGE * BATCH * GROUP + len(taught) + 1
    late = [{"id": first + n, "value": 0.5, "source": "first look"} for n in range(len(people))]
    solera("data", "reward", folder, write(files / "late.jsonl", late))
    revised = [{"id": first + n, "value": float(r != flipped), "source": "people"} for n, r in enumerate(rights)]
    solera("data", "reward", folder, write(files / "revised.jsonl", revised))
    solera("train", "--resume", folder)
    return summary(folder)


def summary(folder: Path) -> dict:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] >= AGE]
    accuracy = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    shares = sorted({name for row in rows for name in row if name.startswith(("origin_tokens/", "origin_weight/"))})
    means = {name: round(sum(row.get(name, 0.0) for row in rows[:-1]) / len(rows[:-1]), 3) for name in shares}
    ages = [row["age/mean"] for row in rows if "age/mean" in row]
    generated = sum(row.get("tokens/generated", 0.0) for row in rows)
    return {"before": accuracy[0], "after": accuracy[-1], "youngest": min(ages), "generated": generated, **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path("runs/no_fresh_data"))
    chosen = parser.parse_args()
    elder(chosen.root, chosen.seed)
    found = {
        name: learn(chosen.root, name, chosen.steps, flipped, Random(chosen.seed))
        for name, flipped in (("revised", False), ("flipped", True))
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
