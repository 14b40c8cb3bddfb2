"""The real commands with a real server: train, resume, eval, generate; a server that is started, and killed."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.command import ROOT, solera
from tests.vllm.conftest import SMALL

pytestmark = pytest.mark.vllm


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_a_server_learns_and_is_resumed(url: str, tmp_path: Path) -> None:
    settings = ("--engine", "vllm", "--engine.urls", url, "--run.root", tmp_path, "--run.name", "run")
    few = ("--evaluate.problems", 100, "--evaluate.every", 0, "--checkpoint.every", 20)
    first = solera("train", ROOT / "recipes" / "demo.toml", *settings, *few, "--run.steps", 40)
    assert first.returncode == 0, first.stderr
    metrics = rows(tmp_path / "run")
    assert metrics[-1]["eval/pass@1"] > metrics[0]["eval/pass@1"] + 0.3
    syncs = [row for row in metrics if "sync/faults" in row]
    assert len(syncs) == 4 and not any(row["sync/faults"] for row in syncs)
    assert max(row["mismatch/logp"] for row in metrics if "mismatch/logp" in row) < 1e-3
    assert not (tmp_path / "run" / "weights").exists()
    more = solera("train", "--resume", tmp_path / "run", "--run.steps", 50)
    assert more.returncode == 0, more.stderr
    assert len([row for row in rows(tmp_path / "run") if "sync/faults" in row]) == 5


def test_eval_and_generate(url: str, tmp_path: Path) -> None:
    served, ours = tmp_path / "served.json", tmp_path / "ours.json"
    words = ("eval", "embedded", "--problems", 60, "--samples", 2)
    done = solera(*words, "--engine", "vllm", "--engine.urls", url, "--json", served)
    assert done.returncode == 0, done.stderr
    assert solera(*words, "--json", ours).returncode == 0
    (theirs,), (mine,) = (json.loads(file.read_text())["models"] for file in (served, ours))
    assert theirs["greedy"]["problems"] == mine["greedy"]["problems"]  # greedy: the same answers
    done = solera(
        "generate", "embedded", "--engine", "vllm", "--engine.urls", url, "--prompts", 5, "--samples", 3,
        "--out", tmp_path / "out", "--export", tmp_path / "out.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 15


def alive(mark: str) -> dict[int, str]:
    """The processes that have the mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def test_nothing_lives_ten_seconds_after_the_run_was_killed(tmp_path: Path) -> None:
    mark = f"SOLERA_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    words = [
        "train", str(ROOT / "recipes" / "demo.toml"), "--engine", "vllm", "--engine.launch", "1",
        *(f"--engine.args={word}" for word in SMALL[:1]), "--run.root", str(tmp_path), "--run.name", "run",
        "--run.steps", "1000",
    ]  # fmt: skip
    run = subprocess.Popen(
        [sys.executable, "-m", "solera.cli", *words], env={**os.environ, name: value}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (metrics.is_file() and metrics.stat().st_size) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    assert run.poll() is None and metrics.is_file(), run.communicate()[0]
    before = alive(mark)
    assert any("EngineCore" in words for words in before.values()), before
    run.send_signal(signal.SIGKILL)
    run.communicate()
    time.sleep(10)
    assert alive(mark) == {}
    assert (tmp_path / "run" / "server" / "vllm.log").stat().st_size > 0
    assert not list(Path("/dev/shm").glob(f"solera-{run.pid}-*"))


def test_a_server_that_does_not_start_is_one_line_with_its_log(tmp_path: Path) -> None:
    done = solera(
        "train", "--engine", "vllm", "--engine.launch", 1, "--engine.args=--no-such-flag", "--run.root", tmp_path,
        "--run.name", "run",
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "the vLLM server did not start" in last and "no-such-flag" in last and "vllm.log" in last
