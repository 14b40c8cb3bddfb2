#!/usr/bin/env python3
"""Make recipes/mixed/: training problems, held-out problems, and responses of two models to the training problems.

old.jsonl      responses of the embedded model before training, with token log-probabilities
teacher.jsonl  responses of the embedded model after 60 batches of `grpo` with another seed; text only

.venv/bin/python scripts/make_mixed_data.py
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import solera
from solera.models.loading import load_reader
from solera.store.database import place_in
from solera.store.exchange import export_rollouts
from solera.tasks.arithmetic import draw_pair

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "mixed"
PROBLEMS, HELD_OUT, ANSWERS = 512, 500, 4
QUIET = solera.ReportConfig(tensorboard=False, progress=False)


def problems(count: int, held_out: bool) -> Iterator[dict[str, str]]:
    rng, distinct = Random(int(held_out)), dict[frozenset[int], tuple[int, int]]()
    while len(distinct) < count:
        pair = draw_pair(rng, 2, held_out)
        distinct.setdefault(frozenset(pair), pair)
    for a, b in distinct.values():
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def write(name: str, lines: Iterator[dict[str, Any]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def answers(model: str, root: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield a model's responses to the training problems, from one epoch with a negligible learning rate."""
    config = solera.Config(
        run=solera.RunConfig(name=name, root=root, steps=PROBLEMS // 32, device="cpu"),
        model=solera.ModelConfig(path=model),
        task=solera.TaskConfig(
            "jsonl", path=str(FOLDER / "problems.jsonl"), held_out_path=str(FOLDER / "held_out.jsonl")
        ),
        collect=solera.CollectConfig(prompts=32, group_size=ANSWERS),
        sync=solera.SyncConfig("never"), learn=solera.LearnConfig(lr=1e-30),
        evaluate=solera.EvaluateConfig(every=0, problems=1), report=QUIET,
    )  # fmt: skip
    folder = solera.train(config).folder
    export_rollouts(place_in(folder), folder / "answers.jsonl")
    codec = load_reader(model).codec
    for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines():
        rollout = json.loads(line)
        (sequence,) = rollout["sequences"]
        ((start, _, _),) = sequence["spans"]
        prompt, response = (
            codec.decode(np.array(ids, np.int32)) for ids in (sequence["ids"][:start], sequence["ids"][start:])
        )
        yield {
            "prompt": prompt, "response": response, "response_ids": sequence["ids"][start:], "logp": sequence["logp"],
            "reward": rollout["rewards"][0]["value"], "model": name,
        }  # fmt: skip


def without(line: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in fields}


def main() -> None:
    write("problems.jsonl", problems(PROBLEMS, held_out=False))
    write("held_out.jsonl", problems(HELD_OUT, held_out=True))
    root = tempfile.mkdtemp()
    teacher = solera.Config(
        run=solera.RunConfig(name="learning", root=root, steps=60, seed=99, device="cpu"),
        objective=solera.ObjectiveConfig("grpo"), sync=solera.SyncConfig(period=1), report=QUIET,
    )  # fmt: skip
    model = solera.train(teacher).folder / "model"
    write("old.jsonl", (without(line, "response") for line in answers("embedded", root, "old")))
    taught = answers(str(model), root, "teacher")
    write("teacher.jsonl", (without(line, "response_ids", "logp") for line in taught))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
