"""The machine's faults: a disk that is full at any stage, a signal. One line, an honest status, and the run goes on."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from solera.cli import main
from solera.learner.learner import Learner
from solera.report.sinks import read_metrics
from solera.sharded.ranks import RankError
from tests.command import run_script, start

RUN = """
run = {{ root = "disk", name = "run", steps = {steps}, device = "cpu" }}
collect = {{ prompts = 4, group_size = 8, offset = 1 }}
evaluate = {{ every = 0, problems = 4 }}
checkpoint = {{ every = {every}, keep = 1 }}
diagnose = {{ every = 0 }}
report = {{ tensorboard = true, progress = false }}
"""


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Make `disk` a file system of so many kilobytes; give it room again."""
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    mounted = []

    def resize(kilobytes: int) -> None:
        mount(*(["-o", f"remount,size={kilobytes}k"] if mounted else ["-t", "tmpfs", "-o", f"size={kilobytes}k",
        "none"]),
              "disk")  # fmt: skip
        mounted.append(kilobytes)

    yield resize
    if mounted:
        gc.collect(1)  # the error of a failed run may still hold its store open
        if subprocess.run(["umount", str(tmp_path / "disk")], capture_output=True, check=False).returncode:
            gc.collect()  # takes half a second: also what was there before the test
            subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def rows(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict[str, float]]:
    """The metrics of a run whose disk never filled up."""
    root = tmp_path_factory.mktemp("whole")
    text = RUN.format(steps=4, every=0).replace('"disk"', f'"{root}"')
    (root / "run.toml").write_text(text)
    assert main(["train", str(root / "run.toml")]) == 0
    return rows(root / "run")


def says_one_line(capfd, status: int) -> str:
    assert status == 1
    said = capfd.readouterr()
    assert not said.out
    assert re.fullmatch(r"solera: disk[^\n]+\n", said.err), said.err
    return said.err


@pytest.mark.parametrize(
    ("kilobytes", "every", "place"),
    [
        (0, 2, "disk"), (12, 2, "store.db"), (40, 2, "store.db"), (64, 2, "disk/run"), (100, 2, "store.db"), (300, 2,
        "step-000002/model"),
        (800, 2, "step-000002/tensors.pt"), (2200, 2, "step-000004/model"), (2700, 2, "step-000004/tensors.pt"), (500,
        0, "unfinished-model"),
    ],
)  # fmt: skip
def test_a_run_whose_disk_fills_up_goes_on_once_there_is_room(disk, capfd, whole, kilobytes, every, place):
    Path("run.toml").write_text(RUN.format(steps=4, every=every))
    disk(kilobytes or 4)
    if not kilobytes:
        Path("disk/ballast").write_bytes(bytes(4096))
    said = says_one_line(capfd, main(["train", "run.toml"]))
    assert place in said
    disk(65536)
    if kilobytes:
        assert said.endswith("continue with: solera train --resume disk/run\n")
        assert main(["train", "--resume", "disk/run"]) == 0
    else:
        assert [path.name for path in Path("disk").iterdir()] == ["ballast"]
        assert main(["train", "run.toml"]) == 0
    assert rows(Path("disk/run")) == whole
    assert (Path("disk/run") / "report.html").exists()
    assert not list(Path("disk/run").rglob(".unfinished*"))


def test_a_disk_too_small_for_plot_and_report_leaves_the_model_and_the_report_can_be_made_later(disk, capfd, whole):
    Path("run.toml").write_text(RUN.format(steps=4, every=0))
    disk(600)
    said = says_one_line(capfd, main(["train", "run.toml"]))
    assert said.endswith("continue with: solera report disk/run\n")
    assert not Path("disk/run/plot.png").exists()
    assert rows(Path("disk/run")) == whole
    assert (Path("disk/run/model") / "model.safetensors").exists()
    with contextlib.suppress(OSError):
        Path("disk/ballast").write_bytes(bytes(2**20))
    assert "report.html: No space left" in says_one_line(capfd, main(["report", "disk/run"]))
    disk(65536)
    assert main(["report", "disk/run"]) == 0
    assert not list(Path("disk/run").glob(".*"))


def test_what_is_written_on_a_full_disk_is_named_and_leaves_nothing(disk, capfd, tmp_path):
    (tmp_path / "run.toml").write_text(RUN.format(steps=2, every=0).replace('"disk"', '"."'))
    assert main(["train", "run.toml"]) == 0
    (tmp_path / "bad.jsonl").write_text("{broken\n" * 2000)
    disk(8)
    Path("disk/ballast").write_bytes(bytes(8192))
    capfd.readouterr()
    for arguments in (
        ["data", "export", "run", "disk/out.jsonl"],
        ["eval", "run", "--problems", "4", "--json", "disk/out.json"],
        ["data", "import", "run", "bad.jsonl", "--skip-bad", "disk/bad.jsonl"],
        ["data", "stats", "run", "--plot", "disk/store.png"],
    ):
        assert main(arguments) == 1
        said = capfd.readouterr().err.splitlines()[-1]
        assert said == f"solera: {arguments[-1]}: No space left on device"
        assert [path.name for path in Path("disk").iterdir()] == ["ballast"]


def test_debug_shows_the_traceback_of_the_machines_fault_and_of_a_users_mistake(disk, capfd):
    Path("run.toml").write_text(RUN.format(steps=4, every=0))
    disk(40)
    for arguments, status in ((["train", "run.toml"], 1), (["train", "nowhere.toml"], 2),
    (["train", "--run.steps", "x"], 2),
                              (["train", "--learn.lr", "nan"], 2), (["report", "nowhere"], 2)):  # fmt: skip
        assert main([*arguments, "--debug"]) == status
        said = capfd.readouterr().err
        assert said.startswith("Traceback (most recent call last)")
        assert said.splitlines()[-1].startswith("solera: ")


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT, signal.SIGINT]],
    ids=["SIGTERM", "SIGTERM twice", "Ctrl-C twice"],
)
def test_a_signal_loses_nothing(tmp_path, signals):
    (tmp_path / "run.toml").write_text(RUN.format(steps=100_000, every=0))
    process = start("train", "run.toml", cwd=tmp_path)
    metrics = tmp_path / "disk" / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.02)
    for number in signals:
        process.send_signal(number)
    told, said = process.communicate()
    assert process.returncode == 130
    assert "stopping after this step, which is saved first" in told
    if len(signals) == 1 or "interrupted" not in said:  # twice is at once, unless the step was over before the second
        assert re.fullmatch(r"solera: stopped after batch \d+; continue with: solera train --resume disk/run\n", said)
        assert list((tmp_path / "disk" / "run" / "checkpoints").glob("step-*"))
    else:
        assert said == "solera: interrupted; continue with: solera train --resume disk/run\n"
    assert [row["step"] for row in read_metrics(metrics)] == list(range(len(read_metrics(metrics))))


def test_a_run_left_at_once_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """What a second signal does, in the middle of the third update."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN.format(steps=5, every=2))

    def update(self, batch, learn=Learner.update):
        if self.version == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(self, batch)

    with monkeypatch.context() as broken:
        broken.setattr(Learner, "update", update)
        assert main(["train", "run.toml"]) == 130
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == "solera: interrupted; continue with: solera train --resume disk/run"
    assert main(["train", "--resume", "disk/run"]) == 0


@pytest.mark.parametrize(("every", "last"), [(2, 2), (0, 0)])
def test_after_a_stop_was_asked_for_a_lost_rank_stops_the_run(tmp_path, monkeypatch, capsys, every, last):
    """A signal to a group of processes may end a rank, too. Here an error in the fourth update stands for that."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN.format(steps=5, every=every))

    def update(self, batch, learn=Learner.update):
        if self.version == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RankError("rank 0 of 1 was ended by signal 15 in learn")
        return learn(self, batch)

    with monkeypatch.context() as broken:
        broken.setattr(Learner, "update", update)
        assert main(["train", "run.toml"]) == 130
    told, said = capsys.readouterr()
    assert "ended by signal 15 in learn; the run stops, because it was asked to" in " ".join(told.split())
    assert "starting all ranks again" not in told
    assert said == f"solera: stopped after batch {last}; continue with: solera train --resume disk/run\n"
    assert main(["train", "--resume", "disk/run"]) == 0
    assert [row["step"] for row in rows(Path("disk/run"))] == list(range(6))


def test_a_gpu_without_memory_is_said_in_one_line_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    """A GPU is not needed for this: torch's error comes from the third update instead."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN.format(steps=5, every=2))

    def update(self, batch, learn=Learner.update):
        if self.version == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 768.00 MiB.")
        return learn(self, batch)

    with monkeypatch.context() as broken:
        broken.setattr(Learner, "update", update)
        assert main(["train", "run.toml"]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("solera: disk/run: the GPU's memory is full: in its config.toml lower engine.max_rows")
    assert said.endswith("continue with: solera train --resume disk/run")
    assert main(["train", "--resume", "disk/run"]) == 0
    assert [row["step"] for row in read_metrics(Path("disk/run/metrics.jsonl"))] == [0, 1, 2, 3, 4, 5]


def test_an_interrupt_while_writing_is_one_line(tmp_path):
    """Two Ctrl-C come while the engine's thread decodes and the main thread waits for it."""
    script = tmp_path / "interrupted.py"
    script.write_text("""
import itertools, os, signal, sys, time
from solera.cli import main
from solera.engines.decoding import PlainDecoder
count, advance = itertools.count(), PlainDecoder.advance
def interrupted(self):
    if next(count) == 20:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
    return advance(self)
PlainDecoder.advance = interrupted
sys.exit(main(["train", "run.toml", "--collect.overlap", "False"]))
""")
    (tmp_path / "run.toml").write_text(RUN.format(steps=50, every=0))
    done = run_script(script, cwd=tmp_path)
    assert done.returncode == 130
    assert done.stderr == "solera: interrupted; continue with: solera train --resume disk/run\n"
