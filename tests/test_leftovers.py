"""Rewards that do not come: what the run drew stays of one visit and one policy, the rest is counted and not used."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from zlib import crc32

import pytest
from rich.console import Console

from solera.config import Config
from solera.errors import SoleraError
from solera.run import running
from tests.conftest import merge

SUMS = [(11, 12), (23, 45), (31, 17), (52, 36), (14, 71), (27, 28), (33, 44), (19, 18), (61, 22), (48, 13)]
RUN = """
run = {{ root = "{root}", name = "{name}", steps = 8, seed = 1, device = "cpu", threads = 1 }}
task = {{ name = "jsonl", path = "{root}/few.jsonl", held_out_share = 0.2 }}
collect = {{ prompts = 4, group_size = 4, overlap = false }}
sync = {{ period = 1 }}
diagnose = {{ every = 0 }}
evaluate = {{ every = 0, problems = 2 }}
checkpoint = {{ every = 3 }}
report = {{ tensorboard = false, progress = false, page = false }}
"""


def config(root: Path, name: str, more: str = "") -> Config:
    lines = (json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in SUMS)
    (root / "few.jsonl").write_text("".join(lines))  # eight to train on: a prompt comes back every other batch
    return merge(merge(Config(), RUN.format(root=root, name=name)), more)


class Forgetful:
    """A judge without an answer for about one attempt in eleven: always the same ones, in every life of a run."""

    __name__ = "forgetful"

    def __init__(self) -> None:
        self.asked = Counter[tuple[str, int | None]]()

    def __call__(self, rollout, row) -> float | None:
        attempt = row["prompt"], rollout.version
        self.asked[attempt] += 1
        if crc32(f"{attempt} {self.asked[attempt]}".encode()) % 11 == 0:
            return None
        return float(rollout.text.strip() == row["answer"])


def rows_of(folder: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(folder / "store.db")) as database:
        return database.execute(query).fetchall()


def rows_without_time(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


@pytest.mark.parametrize(
    ("more", "lag"),
    [
        ("", 0),
        ("collect = { offset = 1 }", 1),
        ("draw = { min_rewarded = 3 }", 0),
        ("draw = { leftovers = 'keep' }", 0),
        ("objective = { name = 'dapo' }", 0),
    ],
)
def test_missing_rewards_leave_an_on_policy_run_on_policy(tmp_path, more, lag):
    folder = running.train(config(tmp_path, "run", more), Console(quiet=True), rewards=[Forgetful()]).folder
    steps = rows_without_time(folder)[:8]
    assert [step["age/max"] for step in steps] == [min(number, lag) for number in range(8)]
    assert all(step["groups/drawn"] >= 4 for step in steps)
    groups = rows_of(
        folder,
        "select count(distinct admission), count(distinct r.version) from uses u join rollouts r on r.id = rollout_id "
        "group by u.version, group_number",
    )
    assert set(groups) == {(1, 1)} and len(groups) == sum(step["groups/drawn"] for step in steps)
    ((left,),) = rows_of(
        folder,
        "select count(*) from rollouts where uses = 0 and origin = 'self' and id in (select rollout_id from rewards) "
        "and admission < (select max(admission) from rollouts where uses > 0)",
    )
    assert steps[-1].get("draw/leftover", 0) == left and (left > 0 or "min_rewarded" in more)


def test_a_run_that_fails_and_is_resumed_leaves_the_same_behind(tmp_path):
    whole = running.train(config(tmp_path, "whole"), Console(quiet=True), rewards=[Forgetful()]).folder
    forgetful = Forgetful()

    def failing(rollout, row):
        if forgetful.asked.total() == 90:
            raise ValueError("the judge is gone")
        return forgetful(rollout, row)

    with pytest.raises(SoleraError, match="the judge is gone"):
        running.train(config(tmp_path, "killed"), Console(quiet=True), rewards=[failing])
    resumed = running.resume(tmp_path / "killed", Console(quiet=True), rewards=[Forgetful()]).folder
    assert rows_without_time(resumed) == rows_without_time(whole)
    assert any(step.get("draw/leftover") for step in rows_without_time(whole))
