"""Going on with a run: one process at a time, from checkpoints that are as they were written, for longer, and not
without the files that the run needs."""

import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from solera.cli import main
from solera.config import Config, override, parse
from solera.errors import SoleraError
from solera.folder.checkpoint import Saver
from solera.objectives.table import resolve_config
from solera.report.sinks import JsonLines, read_metrics
from solera.run import running
from solera.run.evaluating import evaluate_models
from solera.run.task import build_task
from solera.store.ledger import Ledger
from solera.tasks.single_turn import SingleTurn
from tests.command import Process
from tests.test_resume import assert_same_outcome, outcome

STEPS, USES_PER_STEP = 10, 4 * 4
RUN = """
run = {{ root = "{root}", name = "{name}", steps = 10, device = "cpu" }}
collect = {{ prompts = 4, group_size = 4, offset = 1 }}
sync = {{ period = 3 }}
evaluate = {{ every = 0, problems = 8 }}
checkpoint = {{ every = 2, keep = 4 }}
report = {{ tensorboard = false, progress = false, page = false }}
"""
FILES = [
    "state.json", "tensors.pt", "digests.json", "model/digests.json", "model/model.safetensors", "model/config.json",
    "model/generation_config.json", "model/tokenizer.json", "model/tokenizer_config.json",
]  # fmt: skip


def config(root: Path, name: str, **run: int) -> Config:
    return override(parse(RUN.format(root=root, name=name), "test"), "run", **run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that nobody disturbed."""
    return running.train(config(tmp_path_factory.mktemp("whole"), "whole")).folder


@pytest.fixture
def stopped(whole, tmp_path) -> Path:
    """A run that was stopped after its checkpoint of step 8."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints/step-000010")
    return folder


def uses(folder: Path) -> list[tuple[int, int]]:
    with sqlite3.connect(folder / "store.db") as database:
        return database.execute("select version, count(*) from uses group by version order by version").fetchall()


def signalled_after(owner: object, name: str, number: signal.Signals, when: Callable[..., bool]) -> None:
    """Let this process send itself a signal as soon as a call of that function has returned."""
    real = getattr(owner, name)

    def then(*arguments, **keywords):
        result = real(*arguments, **keywords)
        if when(*arguments):
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, then)


def stop_at_step_4_and_die_at_step_8(folder: Path) -> None:
    signalled_after(Saver, "save", signal.SIGSTOP, lambda _, state, __: state.version == 4)
    signalled_after(Saver, "save", signal.SIGKILL, lambda _, state, __: state.version == 8)
    running.train(config(folder.parent, folder.name))


def resume_paused_before_the_lock_and_die_after_the_rewind(folder: Path) -> None:
    real = running.alone

    def alone(folder: Path):
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(folder)

    running.alone = alone
    signalled_after(Ledger, "rewind", signal.SIGKILL, lambda *_: True)
    running.resume(folder)


def wait_until_stopped(pid: int) -> None:
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        assert state != "Z", "it ended"
        time.sleep(0.01)


def test_a_resume_that_waited_while_the_run_went_on_uses_what_is_there_now(tmp_path, whole):
    """A resume that had read the checkpoint of step 4 would undo rows that the one of step 8 depends on."""
    folder = tmp_path / "run"
    first = Process(target=stop_at_step_4_and_die_at_step_8, args=(folder,))
    first.start()
    wait_until_stopped(first.pid)
    second = Process(target=resume_paused_before_the_lock_and_die_after_the_rewind, args=(folder,))
    second.start()
    wait_until_stopped(second.pid)
    for process in (first, second):
        os.kill(process.pid, signal.SIGCONT)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    running.resume(folder)
    assert_same_outcome(folder, whole)
    assert len(read_metrics(folder / "metrics.jsonl")) == STEPS + 1
    assert uses(folder) == [(version, USES_PER_STEP) for version in range(STEPS)]


def command(log: Path, *arguments: str) -> None:
    """`solera`, in a process of its own, with what it says in a file."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = main(list(arguments))
    sys.stdout.flush()
    os._exit(status)


def solera(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    child = Process(target=command, args=(tmp_path / "log", *arguments))
    child.start()
    child.join()
    return child.exitcode, (tmp_path / "log").read_text()


def resume_and_stop_when_it_is_alone(folder: Path) -> None:
    signalled_after(running, "resumable", signal.SIGSTOP, lambda *_: True)
    running.resume(folder)


def test_of_two_resumes_one_goes_on_and_the_other_is_refused_at_once(tmp_path, whole, stopped):
    first = Process(target=resume_and_stop_when_it_is_alone, args=(stopped,))
    first.start()
    wait_until_stopped(first.pid)
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    for more in ([], ["--run.steps", "20"], ["--from", "4"]):
        status, said = solera(tmp_path, "train", "--resume", str(stopped), *more)
        assert (status, said) == (
            2,
            f"solera: {stopped}: another process is training this run: wait for it, or stop it\n",
        )
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    os.kill(first.pid, signal.SIGCONT)
    first.join()
    assert first.exitcode == 0
    assert_same_outcome(stopped, whole)


def test_a_store_that_another_resume_has_rewound_is_refused(stopped, whole, capsys):
    """What the resume of the first test left behind before it took the lock first."""
    shutil.move(stopped / "checkpoints/step-000008", stopped / "later")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "build_loop", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            running.resume(stopped, start=4)
    assert main(["data", "verify", str(stopped)]) == 0
    shutil.rmtree(stopped / "checkpoints/step-000004")
    shutil.move(stopped / "later", stopped / "checkpoints/step-000008")
    with pytest.raises(SoleraError, match=rf"step 8 expects {8 * USES_PER_STEP} uses .* has 64: .*--from"):
        running.resume(stopped)
    assert main(["data", "verify", str(stopped)]) == 1
    assert "step 8 expects 128 uses of rollouts, but the store has 64" in capsys.readouterr().err
    assert_same_outcome(running.resume(stopped, start=0).folder, whole)


def test_a_store_whose_uses_are_of_other_rollouts_is_refused(stopped):
    """As many uses, of rollouts that were written later: a run that was resumed and killed before its checkpoint."""
    with sqlite3.connect(stopped / "store.db") as database:
        (last,) = database.execute("select max(id) from rollouts").fetchone()
        database.execute(
            "update uses set rollout_id = ? where version = 7 and rollout_id = "
            "(select max(rollout_id) from uses where version = 7)",
            (last,),
        )
    with pytest.raises(SoleraError, match="has as many, of other rollouts"):
        running.resume(stopped)


def test_an_older_copy_of_the_store_is_refused(stopped, tmp_path):
    older = running.train(config(tmp_path, "older", steps=4)).folder
    shutil.copy(older / "store.db", stopped / "store.db")
    with pytest.raises(SoleraError, match=r"store\.db: the checkpoint of step 8 expects \d+ rollouts, but"):
        running.resume(stopped)


def test_a_store_that_is_missing_is_told_where_the_run_can_begin_again(stopped, whole, tmp_path):
    (stopped / "store.db").unlink()
    status, said = solera(tmp_path, "train", "--resume", str(stopped))
    assert status == 2 and "store.db: the checkpoint of step 8 expects" in said
    (stopped / "store.db").unlink()
    shutil.rmtree(stopped / "checkpoints")
    status, said = solera(tmp_path, "train", "--resume", str(stopped))
    assert status == 0 and f"note: {stopped / 'store.db'} is missing: rollouts that were imported into it" in said
    assert_same_outcome(stopped, whole)


def flip(file: Path, place: float) -> None:
    """One bit, that far into the file."""
    data = bytearray(file.read_bytes())
    data[min(int(place * len(data)), len(data) - 1)] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_flipped_bit_in_a_checkpoint_is_noticed(stopped, name, place):
    file = stopped / "checkpoints/step-000008" / name
    flip(file, place)
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(SoleraError) as refusal:
        running.resume(stopped)
    said = str(refusal.value)
    assert "\n" not in said and len(said) < 600
    # A damaged list of digests accuses the file that the damaged line is about.
    assert "step-000008: " in said and (Path(name).name in said or name.endswith("digests.json"))
    assert said.endswith(f"the one before it: solera train --resume {stopped} --from 6")
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["tensors.pt", "model/model.safetensors"])
def test_the_command_that_is_offered_goes_on_from_the_checkpoint_before(tmp_path, stopped, whole, name):
    flip(stopped / "checkpoints/step-000008" / name, 0.7)
    status, said = solera(tmp_path, "train", "--resume", str(stopped))
    assert status == 2
    assert f"{Path(name).name} is damaged: it does not match" in said
    offered = said.strip().rpartition(": solera ")[2].split()
    assert offered == ["train", "--resume", str(stopped), "--from", "6"]
    status, said = solera(tmp_path, *offered)
    assert status == 0
    assert "removed step-000008, which is after step 6" in said
    assert_same_outcome(stopped, whole)
    assert uses(stopped) == uses(whole)


def test_without_an_earlier_checkpoint_the_run_can_begin_again(tmp_path, stopped, whole):
    for step in ("step-000004", "step-000006"):
        shutil.rmtree(stopped / "checkpoints" / step)
    flip(stopped / "checkpoints/step-000008/state.json", 0.5)
    status, said = solera(tmp_path, "train", "--resume", str(stopped))
    assert status == 2 and said.endswith(f"solera train --resume {stopped} --from 0\n")
    status, said = solera(tmp_path, "train", "--resume", str(stopped), "--from", "0")
    assert status == 0 and "starting again" in said
    assert_same_outcome(stopped, whole)


def test_a_checkpoint_without_its_digests_is_refused_and_one_from_before_there_were_any_is_taken(
    stopped, whole, capsys
):
    checkpoint = stopped / "checkpoints/step-000008"
    (checkpoint / "digests.json").unlink()
    with pytest.raises(SoleraError, match=r"digests\.json is missing"):
        running.resume(stopped)
    (checkpoint / "model/digests.json").unlink()
    state = json.loads((checkpoint / "state.json").read_text())
    del state["uses"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert_same_outcome(running.resume(stopped).folder, whole)
    said = " ".join(capsys.readouterr().err.split())
    assert "step-000008 was written by a version of Solera without checksums: it cannot be checked for damage" in said


def test_eval_refuses_a_damaged_model(tmp_path, whole):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    for damaged in (folder / "model", folder / "checkpoints/step-000008/model"):
        flip(damaged / "model.safetensors", 0.9)
        asked = [[str(damaged)], [str(folder)]] if damaged.parent == folder else [[str(damaged)]]
        for models in [*asked, [str(folder), "--checkpoints"]]:
            status, said = solera(tmp_path, "eval", *models, "--problems", "4", "--device", "cpu")
            assert status == 2, said
            assert f"model {damaged}: model.safetensors is damaged" in said
            assert "(if you changed it yourself, remove digests.json)" in said
        flip(damaged / "model.safetensors", 0.9)


def test_eval_of_a_running_run_leaves_out_a_checkpoint_that_was_removed_meanwhile(whole, tmp_path, capsys):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    pruned = folder / "checkpoints/step-000006"

    def advance(model: str, made: int, total: int) -> None:
        if pruned.exists():
            pruned.rename(pruned.with_name(".unfinished-step-000006"))

    found = evaluate_models([str(folder)], checkpoints=True, advance=advance)
    assert [Path(model.candidate.name).name for model in found.models] == ["step-000004", "step-000008", "run"]
    assert "step-000006 was removed during the evaluation and is skipped" in " ".join(capsys.readouterr().err.split())


def damaged_while_training(folder: Path, log: Path, damage: str, more: str) -> None:
    """A run whose files are deleted or replaced during its fourth batch."""
    real = JsonLines.log

    def logged(self, step, metrics):
        if step == 3:
            target = folder / damage
            if damage == ".":
                shutil.rmtree(folder)
            elif damage == "store.db":
                target.unlink()
            else:
                shutil.copy(folder / damage.removesuffix("*"), tmp := folder / "copy")
                tmp.rename(folder / damage.removesuffix("*"))
        real(self, step, metrics)

    JsonLines.log = logged
    file = folder.parent / "run.toml"
    file.write_text(RUN.format(root=folder.parent, name=folder.name) + more)
    command(log, "train", str(file))


REPLAY = 'draw = { policy = "replay" }\n'


@pytest.mark.parametrize(
    ("damage", "more"),
    [("store.db", ""), ("store.db*", ""), ("metrics.jsonl*", ""), (".", ""), ("store.db", REPLAY)],
)
def test_what_a_run_needs_is_missed_at_the_next_step(tmp_path, damage, more):
    folder, log = tmp_path / "run", tmp_path / "log"
    child = Process(target=damaged_while_training, args=(folder, log, damage, more))
    child.start()
    child.join()
    said = log.read_text()
    assert child.exitcode == 1, said
    named = damage.removesuffix("*") if damage != "." else r""
    assert f"{folder}/{named}" in said and "was deleted or replaced while it was in use" in said
    assert said.count("\n") == 1 and f"continue with: solera train --resume {folder}" in said
    if damage == ".":
        assert not folder.exists()
    else:
        assert len(read_metrics(folder / "metrics.jsonl")) <= 5


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (None, "is missing 8 rows of 8 (steps 0 to 7)"),
        (slice(0, 3), "is missing 5 rows of 8 (steps 3 to 7)"),
        (slice(1, None), "is missing 1 row of 8 (step 0)"),
    ],
)
def test_lost_rows_of_metrics_are_told(stopped, whole, tmp_path, left, said):
    metrics = stopped / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.unlink()
    if left is not None:
        metrics.write_text("".join(lines[left]))
    status, output = solera(tmp_path, "train", "--resume", str(stopped))
    assert status == 0
    assert f"note: {metrics} {said}: the run continues without them\n" in output
    (rows, weights), (all_rows, all_weights) = outcome(stopped), outcome(whole)
    assert rows == [row for row in all_rows if row in rows] and {8.0, 9.0, 10.0} <= {row["step"] for row in rows}
    assert all((weights[name] == all_weights[name]).all() for name in weights)


def kill_in_the_extension(folder: Path, steps: int) -> None:
    signalled_after(Ledger, "rewind", signal.SIGKILL, lambda *_: True)
    running.resume(folder, changes={"run.steps": steps})


@pytest.mark.parametrize("killed", [False, True])
def test_a_finished_run_is_extended_as_if_it_had_had_more_steps_from_the_beginning(tmp_path, whole, killed):
    """From what a finished run leaves with the default `checkpoint.every`, which it did not reach."""
    short = dataclasses.replace(config(tmp_path, "short", steps=5), checkpoint=Config().checkpoint)
    folder = running.train(short).folder
    status, said = solera(tmp_path, "train", "--resume", str(folder))
    assert status == 2 and "the run is finished" in said and "--run.steps N" in said
    if killed:
        child = Process(target=kill_in_the_extension, args=(folder, STEPS))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        status, said = solera(tmp_path, "train", "--resume", str(folder))
    else:
        status, said = solera(tmp_path, "train", "--resume", str(folder), "--run.steps", str(STEPS))
        assert f"the model after 5 steps is now in {folder / 'model-step-000005'}" in said
    assert status == 0, said
    assert "run.steps is 10, was 5" in said
    assert_same_outcome(folder, whole)
    assert uses(folder) == uses(whole)
    assert (folder / "model-step-000005/model.safetensors").is_file()


def test_an_unfinished_run_is_extended_and_the_next_resume_agrees(tmp_path, stopped):
    longer = running.train(config(tmp_path, "longer", steps=13)).folder
    changes = ["--run.steps", "13", "--engine.max_rows=7", "--checkpoint.keep", "1"]
    child = Process(target=kill_in_the_extension, args=(stopped, 12))
    child.start()
    child.join()
    assert solera(tmp_path, "train", *changes, "--resume", str(stopped))[0] == 0
    written = parse((stopped / "config.toml").read_text(), "test")
    assert (written.run.steps, written.engine.max_rows, written.checkpoint.keep) == (13, 7, 1)
    (rows, _), (longer_rows, _) = outcome(stopped), outcome(longer)
    assert [row["step"] for row in rows] == [row["step"] for row in longer_rows]


def test_an_extension_says_that_a_falling_learning_rate_changes(tmp_path, stopped):
    file = stopped / "config.toml"
    file.write_text(file.read_text().replace('decay = "constant"', 'decay = "linear"'))
    status, said = solera(tmp_path, "train", "--resume", str(stopped), "--run.steps", "12")
    assert status == 0
    assert "learn.decay is linear: the learning rate now falls to zero at step 12 instead of 10" in said
    assert " s since it was resumed" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--learn.lr", "1e-5"], "a resumed run cannot change learn.lr, because that would make it a different run"),
        (
            ["--sync.period=1", "--run.seed", "3", "--run.steps", "20"],
            "a resumed run cannot change run.seed, sync.period",
        ),
        (["--objective", "grpo"], "objective.name"),
        (["--model", "x"], "a resumed run cannot change model.path"),
        (["--task.level", "1"], "a resumed run cannot change task.level"),
        (["--run.steps", "7"], "checkpoint is of step 8, but run.steps is 7: set it to 8 or more"),
        (["--run.steps", "x"], "--run.steps is 'x' but must be a whole number"),
        (["--run.stesp", "20"], "did you mean --run.steps"),
        (["--checkpoint.keep", "0"], "checkpoint.keep is 0; it must be at least 1"),
        (["--from", "5"], "no checkpoint of step 5; it has step-000004, step-000006, step-000008"),
        (["--from", "x"], "--from is 'x'; it must be the step of a checkpoint"),
        (["--from"], "--from needs the step of a checkpoint"),
        (["recipes/demo.toml"], "--resume takes no file"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused(tmp_path, stopped, more, said):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    status, output = solera(tmp_path, "train", "--resume", str(stopped), *more)
    assert status == 2
    assert said in output and output.count("\n") == 1, output
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_a_run_without_a_checkpoint_cannot_be_extended(tmp_path):
    never = dataclasses.replace(
        config(tmp_path, "run", steps=2), checkpoint=dataclasses.replace(Config().checkpoint, every=0)
    )
    folder = running.train(never).folder
    with pytest.raises(SoleraError, match=f"has no checkpoint, .*: solera train --model {folder / 'model'}"):
        running.resume(folder, changes={"run.steps": 9})


class Late(SingleTurn):
    """Sums that nobody has graded yet, but for the held-out ones."""

    async def run(self, prompt, generate):
        rollout = await super().run(prompt, generate)
        return rollout if prompt in self.held_out(8) else dataclasses.replace(rollout, rewards=())


def test_a_run_that_no_reward_reached_does_not_blame_the_problems(tmp_path, capsys):
    chosen = config(tmp_path, "run", steps=2)
    resolved = resolve_config(chosen)

    def task(codec):
        inner = build_task(resolved, codec)
        return Late(inner.problems, inner.grade)

    running.train(chosen, task=task)
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing was learned: no rewards arrived (`solera data reward` adds them" in said
    assert "easier problems" not in said


def test_a_run_whose_responses_were_all_cut_off_says_so(tmp_path, capsys):
    chosen = config(tmp_path, "run", steps=2)
    chosen = override(override(chosen, "sampling", max_tokens=1), "reward", truncated="mask")
    running.train(chosen)
    assert "nothing was learned: every response was cut off and masked" in " ".join(capsys.readouterr().err.split())
