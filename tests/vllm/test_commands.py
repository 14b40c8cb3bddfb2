"""The real commands with a real server: train, resume, eval, generate; a server that is started, and killed."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import ROOT, solera
from tests.vllm.conftest import SMALL

pytestmark = pytest.mark.vllm


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_a_server_learns_and_is_resumed(url: str, tmp_path: Path) -> None:
    settings = ("--engine", "vllm", "--engine.urls", url, "--run.root", tmp_path, "--run.name", "run")
    few = ("--evaluate.problems", 100, "--evaluate.every", 6, "--checkpoint.every", 6)
    fast = ("--learn.lr", 0.002, "--sync.period", 3, "--run.steps", 13)
    first = solera("train", ROOT / "recipes" / "demo.toml", *settings, *few, *fast)
    assert first.returncode == 0, first.stderr
    assert "evaluation runs on the server, with the weights that were published last" in " ".join(first.stdout.split())
    metrics = rows(tmp_path / "run")
    assert metrics[-1]["eval/pass@1"] > metrics[0]["eval/pass@1"] + 0.3
    assert [row["eval/version"] for row in metrics if "eval/version" in row] == [0, 6, 12, 12]
    syncs = [row for row in metrics if "sync/faults" in row]
    assert len(syncs) == 5 and not any(row["sync/faults"] for row in syncs)
    assert max(row["mismatch/logp"] for row in metrics if "mismatch/logp" in row) < 1e-3
    assert not (tmp_path / "run" / "weights").exists()
    more = solera("train", "--resume", tmp_path / "run", "--run.steps", 16)
    assert more.returncode == 0, more.stderr
    metrics = rows(tmp_path / "run")
    assert len([row for row in metrics if "sync/faults" in row]) == 6
    assert [row["sync/version"] for row in metrics[:-1]] == [step // 3 * 3 for step in range(16)]


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


def test_a_killed_server_is_started_again_and_nothing_lives_ten_seconds_after_the_run_was_killed(
    tmp_path: Path,
) -> None:
    mark = f"SOLERA_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    words = [
        "train", str(ROOT / "recipes" / "demo.toml"), "--engine", "vllm", "--engine.launch", "2",
        *(f"--engine.args={word}" for word in SMALL[:1]), "--run.root", str(tmp_path), "--run.name", "run",
        "--run.steps", "1000", "--collect.prompts", "4", "--sync.period", "5", "--evaluate.problems", "20",
        "--reward.functions", f"{tmp_path / 'reward.py'}:at_leisure",
    ]  # fmt: skip
    said, leisure = tmp_path / "said", "    time.sleep(2)  # leaves the processor to the server that starts again\n"
    (tmp_path / "reward.py").write_text(
        f"import time\n\n\ndef at_leisure(completions, **_):\n{leisure}    return [0.0] * len(completions)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "solera.cli", *words], env={**os.environ, name: value}, cwd=ROOT,
        stdout=said.open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip

    def wait_for(holds: Callable[[list[dict[str, float]]], bool]) -> list[dict[str, float]]:
        deadline = time.monotonic() + 900
        while run.poll() is None and time.monotonic() < deadline:
            found = rows(tmp_path / "run") if (tmp_path / "run" / "metrics.jsonl").is_file() else []
            if holds(found):
                return found
            time.sleep(0.5)
        raise AssertionError(said.read_text())

    wait_for(bool)
    before = alive(mark)
    engines = [process for process, words in before.items() if "EngineCore" in words]
    assert len(engines) == 2, before
    os.kill(engines[0], signal.SIGKILL)
    metrics = wait_for(lambda found: any(row.get(f"engine/{n}/restarts") for row in found for n in range(2)))
    (died,) = (n for n in range(2) if any(row[f"engine/{n}/set_aside"] for row in metrics))
    away = [row for row in metrics if not row[f"engine/{died}/serving"]]
    assert away and all(row[f"engine/{1 - died}/tokens"] for row in away[1:])  # the other one goes on
    later = len(metrics)
    wait_for(lambda found: any(row[f"engine/{died}/tokens"] for row in found[later:]))
    assert "is back with the weights of version" in " ".join(said.read_text().split())
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 10
    while (left := alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert all((tmp_path / "run" / "server" / name).stat().st_size > 0 for name in ("vllm.log", "vllm-1.log"))
    assert not list(Path("/dev/shm").glob(f"solera-{run.pid}-*"))


def test_a_server_that_does_not_start_is_one_line_with_its_log(tmp_path: Path) -> None:
    done = solera(
        "train", "--engine", "vllm", "--engine.launch", 1, "--engine.args=--no-such-flag", "--run.root", tmp_path,
        "--run.name", "run",
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "vLLM server http://127.0.0.1:" in last and "did not start" in last
    assert "no-such-flag" in last and "vllm.log" in last
