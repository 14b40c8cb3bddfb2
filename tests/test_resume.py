"""A run that is killed, however often and wherever, and resumed ends bit for bit as if nothing had happened."""

import dataclasses
import json
import os
import re
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from solera import open_store
from solera.config import parse
from solera.errors import SoleraError
from solera.folder.checkpoint import RunState, Saver
from solera.folder.files import UNFINISHED, alone, seal
from solera.models import loading
from solera.records import Reward
from solera.report.sinks import read_metrics
from solera.run import parts, running
from solera.store.ledger import Ledger
from solera.store.statistics import statistics
from solera.sync.rules import SyncState
from solera.tasks.arithmetic import is_held_out
from tests.command import Process

RUN = """
run = {{ root = "{root}", name = "{name}", steps = 14, device = "cpu" }}
collect = {{ prompts = 6, group_size = 6, offset = 2 }}
sync = {{ period = 3 }}
diagnose = {{ probe_prompts = 3, every = 2 }}
objective = {{ beta = 0.02, ref_ema = 0.3 }}
learn = {{ passes = 2, decay = "linear" }}
evaluate = {{ every = 4, problems = 20 }}
checkpoint = {{ every = {every}, keep = 2 }}
report = {{ tensorboard = true, progress = false, page = false }}
"""


def config(root: Path, name: str, every: int = 2):
    return parse(RUN.format(root=root, name=name, every=every), "test")


def outcome(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder / "metrics.jsonl")
    ]
    return rows, loading.load(str(folder / "model"), torch.device("cpu"))[0].parameters()


def assert_same_outcome(a: Path, b: Path) -> None:
    (rows_a, weights_a), (rows_b, weights_b) = outcome(a), outcome(b)
    assert rows_a == rows_b
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)


def go_on(folder: Path) -> None:
    """What a person does after a kill: start it anew where nothing was written yet, else resume it."""
    if (folder / "config.toml").exists():
        running.resume(folder)
    else:
        running.train(config(folder.parent, folder.name, every=1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that nobody disturbed."""
    return running.train(config(tmp_path_factory.mktemp("whole"), "whole")).folder


def test_killed_at_twenty_random_moments(tmp_path, whole):
    rng = np.random.default_rng(0)
    kills, number = 0, 0
    while kills < 20:
        folder, lives = tmp_path / f"killed-{number}", 0
        number += 1
        while not (folder / "model").exists():
            child = Process(target=go_on, args=(folder,))
            child.start()
            # Each life may last longer than the one before, or a slow machine would never come to an end.
            child.join(timeout=float(rng.uniform(0.05, 0.8 + 0.1 * lives)))
            lives += 1
            if child.is_alive():
                child.kill()
                child.join()
                kills += 1
            else:
                assert child.exitcode == 0
        assert_same_outcome(folder, whole)
        with sqlite3.connect(folder / "store.db") as database:
            assert database.execute("select count(*), max(uses) from rollouts where uses > 0").fetchone() == (
                14 * 36,
                1,
            )
            assert database.execute("select count(distinct version) from uses").fetchone() == (14,)


STAGES = {"save": torch, "asdict": dataclasses, "rename": Path}


def die_while_saving(folder: Path, name: str) -> None:
    """Go on, and be killed the third time that function is called for a checkpoint."""
    owner = STAGES[name]
    real, count = getattr(owner, name), iter(range(100))

    def once(*arguments, **keywords):
        if (name == "asdict" or "step-" in f"{arguments[0]}{arguments[-1]}") and next(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)

    setattr(owner, name, once)
    go_on(folder)


def test_killed_while_a_checkpoint_is_written(tmp_path, whole):
    """At every stage of writing: before the tensors, before the state, before the rename."""
    folder = tmp_path / "torn"
    for name in STAGES:
        child = Process(target=die_while_saving, args=(folder, name))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert list((folder / "checkpoints").glob(f"{UNFINISHED}*"))
    running.resume(folder)
    assert_same_outcome(folder, whole)
    assert not list((folder / "checkpoints").glob(f"{UNFINISHED}*"))


def train_until_interrupted(folder: Path) -> None:
    try:
        running.train(config(folder.parent, folder.name, every=0))
    except running.InterruptedRunError as stopped:
        os._exit(130 if str(stopped).endswith(f"continue with: solera train --resume {folder}") else 1)


def test_an_interrupt_finishes_the_step_saves_and_leaves(tmp_path, whole):
    folder = tmp_path / "asked"
    child = Process(target=train_until_interrupted, args=(folder,))
    child.start()
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder / "metrics.jsonl")) < 3:
        assert child.is_alive()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGINT)
    child.join()
    assert child.exitcode == 130
    (saved,) = (folder / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(read_metrics(folder / "metrics.jsonl"))
    running.resume(folder)
    assert_same_outcome(folder, whole)


def test_a_checkpoint_knows_its_own_accuracy_and_the_best_is_kept(whole, tmp_path):
    kept = sorted(path.name for path in (whole / "checkpoints").glob("step-*"))
    assert kept[-2:] == ["step-000012", "step-000014"]
    loading.load(str(whole / "checkpoints" / kept[-1] / "model"), torch.device("cpu"))
    evaluated = {row["step"]: row.get("eval/pass@1") for row in read_metrics(whole / "metrics.jsonl")}
    for name in kept:
        state = json.loads((whole / "checkpoints" / name / "state.json").read_text())
        assert state["accuracy"] == evaluated[state["version"]]
    saver = Saver(tmp_path / "checkpoints", every=1, keep=2, save_model=lambda folder: folder.mkdir())
    for version, accuracy in enumerate([0.1, 0.9, None, 0.5, 0.4, None]):
        saver.save(RunState("a", version, SyncState(), 0, 0, accuracy), {"learner": {}, "engine": {}})
    assert sorted(path.name for path in saver.folder.iterdir()) == ["step-000001", "step-000004", "step-000005"]


def test_a_run_that_is_still_training_is_not_resumed(whole, tmp_path):
    folder = tmp_path / "busy"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    with alone(folder), pytest.raises(SoleraError, match="another process is training this run"):
        running.resume(folder)
    assert_same_outcome(running.resume(folder).folder, whole)


@pytest.mark.parametrize("kept", ["bfloat16", None])
def test_a_checkpoint_tells_the_arithmetic_that_its_run_began_with(whole, tmp_path, monkeypatch, kept):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(folder / "model")
    file = sorted((folder / "checkpoints").glob("step-*"))[-1] / "state.json"
    state = json.loads(file.read_text())
    assert state.pop("compute") == "float32"
    file.write_text(json.dumps(state if kept is None else {**state, "compute": kept}))
    seal(file.parent)
    given, real = [], parts.compute_of

    def compute_of(config, model, device, task, say, begun):
        given.append(begun)
        return real(config, model, device, task, say, begun)

    monkeypatch.setattr(parts, "compute_of", compute_of)
    assert_same_outcome(running.resume(folder).folder, whole)
    assert given == [kept]


def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path, whole):
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    for damage in (b"", b"not a checkpoint", (newest / "tensors.pt").read_bytes()[:-100]):
        (newest / "tensors.pt").write_bytes(damage)
        with pytest.raises(SoleraError, match="the checkpoint cannot be read") as refusal:
            running.resume(folder)
        assert "\n" not in str(refusal.value)


def test_a_damaged_checkpoint_is_moved_away_and_the_run_goes_on_from_the_one_before(tmp_path, whole):
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    older, newest = sorted((folder / "checkpoints").glob("step-*"))[-2:]
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(
        SoleraError, match=rf"{newest.name}: .*: model\.safetensors is damaged.*to resume from {older.name}, the one"
    ):
        running.resume(folder)
    newest.rename(tmp_path / newest.name)
    assert_same_outcome(running.resume(folder).folder, whole)


def test_fewer_steps_than_were_made_are_refused(tmp_path, whole):
    folder = tmp_path / "fewer"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    step = int(sorted((folder / "checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))
    settings = folder / "config.toml"
    settings.write_text(re.sub(r"(?m)^steps = \d+$", f"steps = {step - 1}", settings.read_text()))
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(SoleraError, match=rf"checkpoint is of step {step}, but run\.steps .* set it to {step} or more"):
        running.resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_run_begun_before_there_were_probes_goes_on(tmp_path, whole):
    folder = tmp_path / "old"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    older, newest = sorted((folder / "checkpoints").glob("step-*"))[-2:]
    shutil.rmtree(newest)
    tensors = torch.load(older / "tensors.pt", weights_only=True)
    del tensors["probe"]
    torch.save(tensors, older / "tensors.pt")
    seal(older)
    running.resume(folder)
    without = [
        [{k: v for k, v in row.items() if k.split("/")[0] not in ("improvement", "probe")} for row in outcome(each)[0]]
        for each in (folder, whole)
    ]
    assert without[0] == without[1]


def replaying(root: Path, name: str):
    draw = 'draw = { policy = "replay", order = "uniform", fresh = 0.5 }'
    return parse(RUN.format(root=root, name=name, every=2) + draw, "test")


def replay_until_killed(folder: Path, steps: int) -> None:
    """A run that draws at random from what it wrote, killed after so many batches were recorded."""
    real, count = Ledger.record, iter(range(100))

    def record(self, uses):
        real(self, uses)
        if next(count) == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    Ledger.record = record
    if (folder / "config.toml").exists():
        running.resume(folder)
    else:
        running.train(replaying(folder.parent, folder.name))


def test_a_killed_run_replays_what_it_would_have_replayed(tmp_path):
    undisturbed = running.train(replaying(tmp_path, "undisturbed")).folder
    for steps in (4, 3):
        child = Process(target=replay_until_killed, args=(tmp_path / "killed", steps))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    running.resume(tmp_path / "killed")
    assert_same_outcome(tmp_path / "killed", undisturbed)


def beside_a_teacher(root: Path, name: str, every: int):
    data = root / "teacher.jsonl"
    sums = [(a, b) for a in range(10, 100, 7) for b in range(10, 100, 7) if not is_held_out(a, b)]
    lines = [
        {"prompt": f"{a}+{b}=", "response": str(a + b + wrong), "model": "teacher", "reward": float(not wrong)}
        for a, b in sums for wrong in (0, 1, 0, 2, 0, 3)
    ]  # fmt: skip
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mixed = (
        f'store = {{ data = ["{data}"] }}\ndraw = {{ policy = "mixed", shares = ["self=0.5", "model:teacher=0.5"] }}\n'
    )
    text = RUN.replace("beta = 0.02, ref_ema = 0.3", 'name = "red_weight"').replace("steps = 14", "steps = 8")
    return parse(text.format(root=root, name=name, every=every) + mixed, "test")


def learn_beside_a_teacher_until_killed(folder: Path, every: int) -> None:
    real, count = Ledger.record, iter(range(100))

    def record(self, uses):
        real(self, uses)
        if next(count) == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    Ledger.record = record
    running.train(beside_a_teacher(folder.parent, folder.name, every))


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    """A run beside a teacher that nobody disturbed. How often checkpoints are written has no influence on it."""
    return running.train(beside_a_teacher(tmp_path_factory.mktemp("taught"), "taught", 0)).folder


@pytest.mark.parametrize(("every", "said"), [(0, "no checkpoint: starting again"), (3, "resuming from step 3")])
def test_a_killed_run_keeps_the_teachers_text_and_late_rewards(tmp_path, taught, every, said):
    child = Process(target=learn_beside_a_teacher_until_killed, args=(tmp_path / "killed", every))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    graded = Path(shutil.copytree(tmp_path / "killed", tmp_path / "graded"))
    console = Console(file=StringIO(), width=200)
    running.resume(tmp_path / "killed", console)
    assert said in console.file.getvalue()
    assert_same_outcome(tmp_path / "killed", taught)
    with closing(open_store(graded)) as store:
        assert store.revise([(1, Reward(0.125))]) == 1
        imported = [dataclasses.replace(r, origin="model:other", lineage=None) for r in store.fetch([2, 3])]
        assert store.add_imported(imported) == (2, 0)
    running.resume(graded)
    held = {line.name: line.rollouts for line in statistics(graded / "store.db")["origin"]}
    assert held["model:other"] == 2
    with closing(open_store(graded)) as store:
        assert store.fetch([1])[0].reward == 0.125


def on_policy(root: Path, name: str, steps: int):
    text = RUN.replace("period = 3", "period = 1").replace("steps = 14", f"steps = {steps}")
    return parse(text.format(root=root, name=name, every=2), "test")


def test_weights_that_an_engine_of_its_own_left_do_not_reach_the_learner(tmp_path):
    """At v = 1 the engine shares the learner's memory; a checkpoint from elsewhere may hold its older weights."""
    undisturbed = running.train(on_policy(tmp_path, "undisturbed", 8)).folder
    folder = shutil.copytree(undisturbed, tmp_path / "resumed")
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints/step-000008")
    tensors = torch.load(folder / "checkpoints/step-000006/tensors.pt", weights_only=True)
    assert tensors["engine"] == {}
    model = loading.load("embedded", torch.device("cpu"))[0]
    tensors["engine"] = {name: parameter.detach() for name, parameter in model.parameters().items()}
    torch.save(tensors, folder / "checkpoints/step-000006/tensors.pt")
    seal(folder / "checkpoints/step-000006")
    running.resume(folder)
    assert_same_outcome(folder, undisturbed)


def test_what_cannot_be_resumed_says_why(tmp_path, whole):
    with pytest.raises(SoleraError, match=r"no config\.toml"):
        running.resume(tmp_path)
    with pytest.raises(SoleraError, match="the run is finished"):
        running.resume(whole)
