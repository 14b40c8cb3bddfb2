"""`solera bench`: the real command, what it prints and writes, and what it refuses."""

import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from solera.bench.bench import _share_of_peak, _spread
from solera.bench.options import BenchOptions, check
from solera.errors import SoleraError
from tests.command import SEARCH_PATH, solera, start

SMALL = ["--prompts", "4", "--group", "2", "--steps", "3", "--device", "cpu"]


bench = partial(solera, "bench", COLUMNS="200")


def test_a_bench_that_is_killed_leaves_what_it_measured_and_parts_add_up_to_no_more_than_the_whole(tmp_path):
    path, ahead = tmp_path / "steps.json", "Solera, v = 2, overlap"
    variants = ["--v", "1", "2", "--overlap", "True"]
    with start("bench", *SMALL, *variants, "--rounds", 50, "--json", path, COLUMNS="200") as running:
        for name in ("Solera, v = 1", ahead):
            assert running.stdout.readline().startswith(f"round 1, {name}: ")
        running.kill()
    rounds = json.loads(path.read_text())["rounds"]
    assert {name: len(several) for name, several in rounds.items()} == {"Solera, v = 1": 1, ahead: 1}
    for name, several in rounds.items():
        for one in several:
            assert len(one["steps"]) == 3
            for step in one["steps"]:
                parts = step["time/generate"] + step["time/learn"] + step["time/sync"]
                assert name == ahead or 0 < step["time/decode"] < step["time/generate"]
                assert 0 <= step["time/proof"] <= step["time/sync"]
                assert (step["time/proof"] > 0) == (step["time/sync"] > 0)
                assert parts + step["time/diagnose"] < step["whole"]
    synced = [step["time/sync"] > 0 for step in rounds[ahead][0]["steps"]]
    assert synced in ([True, False, True], [False, True, False])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no list of processes here")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -9)])
def test_a_bench_that_ends_takes_along_what_it_measures(tmp_path, number, status):
    with start("bench", *SMALL[:-4], "--steps", 100000, "--json", tmp_path / "steps.json") as running:
        _until(lambda: len(_descendants(running.pid)) == 2)  # the server and the process that measures
        started = _descendants(running.pid)
        running.send_signal(number)
    assert running.returncode == status
    _until(lambda: not started & _parents().keys())


def _descendants(process: int) -> set[int]:
    parents, found = _parents(), {process}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def _parents() -> dict[int, int]:
    """The parent of every process that has not ended."""
    stats = (_read(path) for path in Path("/proc").glob("[0-9]*/stat"))
    rows = [(stat.split()[0], *stat.rpartition(b") ")[2].split()[:2]) for stat in stats if stat]
    return {int(pid): int(parent) for pid, state, parent in rows if state != b"Z"}


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


STAND_IN = """
import json, sys, time
from types import SimpleNamespace
from transformers.trainer_callback import DefaultFlowCallback
open("calls.jsonl", "a").write(json.dumps(sys.argv[1:]) + chr(10))
state = SimpleNamespace(global_step=0, max_steps=100)
for _ in range(5):
    time.sleep(0.4 if "use_vllm=true" in sys.argv else 0.2)
    DefaultFlowCallback().on_step_end(
        SimpleNamespace(logging_strategy="no", eval_strategy="no", save_strategy="no", bf16=True),
        state, SimpleNamespace(), model=SimpleNamespace(dtype="torch.bfloat16"),
    )
"""
"""Ends steps as TRL's trainer does, after a fixed time, and writes down how it was called."""


@pytest.fixture
def interpreter(tmp_path) -> Path:
    """A Python in which PEFT is not installed. A stand-in does not need it, and it takes as long to load as torch."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text("import sys\nsys.modules['peft'] = None\n")
    path = tmp_path / "python"
    folders = os.pathsep.join([str(tmp_path / "without"), SEARCH_PATH])
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{folders}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def test_both_peers_get_the_same_random_model_and_a_ratio_each(tmp_path, interpreter):
    script, path = tmp_path / "stand_in.py", tmp_path / "steps.json"
    calls = tmp_path / "calls.jsonl"
    script.write_text(STAND_IN.replace("calls.jsonl", str(calls)))
    done = bench(*SMALL, "--unmasked", "--random_weights", "tiny", "--trl_step", str(script), "--trl_vllm",
                 "--trl_python", interpreter, "--json", str(path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "99,712 parameters" in done.stdout  # 39 · 64 + 2 · (2 · 64² + 2 · 64 · 32 + 3 · 64 · 192 + 2 · 64) + 64
    assert "TRL: weights bfloat16, trained as they are, bfloat16 autocast" in " ".join(done.stdout.split())
    plain, with_vllm = (json.loads(line) for line in calls.read_text().splitlines())
    assert with_vllm == [*plain, "--option", "use_vllm=true", "--option", 'vllm_mode="colocate"']
    rounds = json.loads(path.read_text())["rounds"]
    quick, slow = ([step["whole"] for step in rounds[name][0]["steps"]] for name in ("TRL", "TRL with vLLM"))
    assert len(quick) == len(slow) == 3
    ours = statistics.median(step["whole"] for step in rounds["Solera, v = 1"][0]["steps"])
    for name, theirs in (("TRL", quick), ("TRL with vLLM", slow)):
        (ratio,) = re.findall(rf"of {name}'s step[^0-9]+([0-9.]+) \(", done.stdout)
        assert float(ratio) == pytest.approx(ours / statistics.median(theirs), abs=6e-4)
    assert 0.2 <= min(quick) < 0.4 <= min(slow)


def test_streaming_is_compared_with_lock_step_under_further_settings(tmp_path):
    path, modes = tmp_path / "steps.json", ["--mode", "lock_step", "stream", "drain"]
    settings = ["--settings", "task.level=1", "sampling.temperature=0.5"]
    done = bench(*SMALL, "--v", "2", *modes, "--warm_up", "4", *settings, "--json", path)
    assert done.returncode == 0, done.stderr
    rounds = {name: several[0]["steps"] for name, several in json.loads(path.read_text())["rounds"].items()}
    assert list(rounds) == ["Solera, v = 2", "Solera, v = 2, stream", "Solera, v = 2, stream, drain"]
    lengths = [step["response/length"] for steps in rounds.values() for step in steps]
    assert len(lengths) == 9 and max(lengths) <= 3  # a sum of one-digit numbers has two digits at most, and an end
    speeds = [sum(s["tokens/generated"] for s in steps) / sum(s["whole"] for s in steps) for steps in rounds.values()]
    (line,) = (line for line in done.stdout.splitlines() if "of lock-step's" in line)
    shown = [float(ratio) for ratio in re.findall(r"([0-9.]+) \(", line)]
    assert shown == pytest.approx([speeds[1] / speeds[0], speeds[2] / speeds[0]], abs=6e-4)


def test_what_was_measured_on_problems_of_a_file_is_shown_though_a_peer_fails(tmp_path, interpreter):
    script, path, problems = tmp_path / "broken.py", tmp_path / "steps.json", tmp_path / "problems.jsonl"
    callbacks = tmp_path / "without" / "transformers" / "trainer_callback.py"
    callbacks.parent.mkdir()  # the real package takes seconds to load, and the script fails before a step ends
    (callbacks.parent / "__init__.py").touch()
    callbacks.write_text("class DefaultFlowCallback:\n    def on_step_end(self): ...\n")
    script.write_text("raise ValueError('no such trainer')")
    problems.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(40)))
    trl = ["--trl_step", script, "--trl_python", interpreter]
    done = bench(*SMALL, "--problems", problems, *trl, "--rounds", 2, "--json", path)
    assert done.returncode == 2
    assert "107,904 parameters" in done.stdout
    assert done.stdout.count("no such trainer") == 1  # not tried again
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("round")] == [
        "round 1, Solera, v = 1",
        "round 2, Solera, v = 1",
    ]
    assert "Solera, v = 1" in done.stdout
    assert done.stderr.strip().splitlines()[-1].endswith("not measured: TRL")
    assert {name: len(several) for name, several in json.loads(path.read_text())["rounds"].items()} == {
        "Solera, v = 1": 2
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"group": 1}, "--group is 1; it must be at least 2"),
        ({"steps": 0}, "--steps is 0; it must be at least 1"),
        ({"v": (1, 10, 10)}, "--v is 1 10 10: 10 is there twice"),
        ({"v": ()}, "--v is empty; give one or more"),
        ({"problems": "nowhere.jsonl"}, "--problems: nowhere.jsonl: no such file"),
        ({"trl_step": "nowhere.py"}, "--trl_step: nowhere.py: no such file"),
        ({"trl_vllm": True}, "--trl_vllm measures TRL's step: give the script"),
        ({"warm_up": 0}, "--warm_up is 0; it must be at least 1"),
        ({"trl_steps": 0}, "--trl_steps is 0; it must be at least 1"),
        ({"mode": ("stream", "stream")}, "--mode is stream stream; give lock_step, stream or drain, each once"),
        ({"mode": ("drain",), "overlap": True}, "--overlap has no effect on streaming"),
        ({"settings": ("sync.period",)}, "--settings sync.period: must be KEY=VALUE"),
        ({"settings": ("sync.perio=2",)}, "--settings sync.perio=2: unknown field sync.perio; did you mean period?"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, said):
    with pytest.raises(SoleraError, match=said):
        check(BenchOptions(**wrong))


def test_share_of_the_peak_and_spread():
    step = {"tokens/computed": 1e5, "time/learn": 0.5}
    one = {"device": "NVIDIA H200", "parameters": 135e6, "steps": [step]}
    assert _share_of_peak([one]) == "20.5%"  # 6 · 135e6 · 1e5 / 0.5 / 790e12
    assert _share_of_peak([{**one, "lora": 16}]) == "13.7%"  # 4 instead of 6
    assert _share_of_peak([{**one, "device": "cpu"}]) == ""
    assert _spread([1.0, 2.0, 3.0]) == "2.0000 (1.0000–3.0000)"


@pytest.mark.parametrize(
    ("further", "said"),
    [(("--memory", "lean"), "weights bfloat16 (one copy), moments in 8 bits"), (("--lora", "2"), "masters float32")],
)
def test_other_ways_to_train_are_measured(further, said, tmp_path):
    path = tmp_path / "steps.json"
    done = bench(*SMALL, *further, "--json", path)
    assert done.returncode == 0, done.stderr
    ((one,),) = json.loads(path.read_text())["rounds"].values()
    assert one["types"].startswith(said)
    assert one["parameters"] >= 107_000  # all weights of the embedded model, not the adapters alone


def test_a_limit_for_a_gpu_that_is_not_there_is_refused():
    done = bench(*SMALL, "--gpu_memory", "4")
    assert done.returncode == 2
    assert done.stderr == "solera: --gpu_memory is set, but this runs on a CPU: remove it\n"
