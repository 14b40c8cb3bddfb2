"""Answers of the current policy, of an older version of it and of another model, compared within one group.

    python benchmarks/mixed_groups.py               # all of it: data, then recipes/mixed_groups.toml
    python benchmarks/mixed_groups.py --quick       # options are those of `solera sweep`

First the data is made, into the folder mixed_groups/: problems, and to each of them six answers of the embedded model
as it is before training (the older version, with its log-probabilities), and six of another model, one that was
trained for a while, as plain text without log-probabilities. Then every cell of the sweep is trained.
"""

import json
import shutil
import sys
from pathlib import Path
from random import Random

import solera
from solera.cli import main as command
from solera.config import Config, override
from solera.models.loading import load_reader
from solera.protocols import Codec
from solera.records import Rollout
from solera.store.database import place_in
from solera.store.lines import plain
from solera.store.reading import reading
from solera.tasks.arithmetic import draw_pair

FOLDER = Path("mixed_groups")
PROBLEMS, HELD_OUT, ANSWERS, BATCH = 768, 400, 6, 64


def write(name: str, lines: list[dict]) -> Path:
    path = FOLDER / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def problems(count: int, held_out: bool) -> list[dict]:
    rng, pairs = Random(0), dict[tuple[int, int], None]()
    while len(pairs) < count:
        pairs[draw_pair(rng, 2, held_out)] = None
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def config(name: str, model: str, steps: int, lr: float, seed: int) -> Config:
    """On the problems, in order that every one is met once in PROBLEMS / BATCH steps."""
    changes = {
        "run": {"name": name, "root": str(FOLDER), "steps": steps, "seed": seed}, "model": {"path": model},
        "task": {"name": "jsonl", "path": str(FOLDER / "problems.jsonl"),
                 "held_out_path": str(FOLDER / "held_out.jsonl")},
        "collect": {"prompts": BATCH, "group_size": ANSWERS}, "learn": {"lr": lr}, "sync": {"period": 1},
        "evaluate": {"every": 0, "problems": HELD_OUT}, "report": {"tensorboard": False, "progress": False},
    }  # fmt: skip
    chosen = Config()
    for room, values in changes.items():
        chosen = override(chosen, room, **values)
    return chosen


def answers(name: str, model: str, seed: int) -> list[Rollout]:
    """What a model answers: six times each problem, graded, nothing learned."""
    run = solera.train(config(name, model, PROBLEMS // BATCH, 0.0, seed))
    with reading(place_in(run.folder)) as opened:
        return [rollout for rollout, _ in opened.rollouts()]


def as_text(rollout: Rollout, codec: Codec) -> dict:
    """What another model's answer looks like to whoever did not sample it."""
    (sequence,) = rollout.sequences
    start = sequence.spans[0].start
    return {
        "prompt": codec.decode(sequence.token_ids_T[:start]), "response": codec.decode(sequence.token_ids_T[start:]),
        "model": "other", "finish_reason": rollout.finish_reason, "reward": rollout.reward,
    }  # fmt: skip


def make_data() -> None:
    FOLDER.mkdir()
    write("problems.jsonl", problems(PROBLEMS, held_out=False))
    write("held_out.jsonl", problems(HELD_OUT, held_out=True))
    write("old.jsonl", [plain(rollout, 0.0) for rollout in answers("older", "embedded", 100)])
    other, codec = solera.train(config("other", "embedded", 24, 3e-4, 200)), load_reader("embedded").codec
    write("other.jsonl", [as_text(rollout, codec) for rollout in answers("others", str(other.model), 300)])


if __name__ == "__main__":
    if not (FOLDER / "other.jsonl").exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        make_data()
    recipe = Path(__file__).parents[1] / "recipes" / "mixed_groups.toml"
    sys.exit(command(["sweep", str(recipe), *sys.argv[1:]]))
