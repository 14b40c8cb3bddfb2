"""A vLLM server inside a Ray actor (`cluster.engines` with `engine.name = "vllm"`)."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from solera.config import ClusterConfig, Config, EngineConfig, override
from solera.engines.pool import EnginePool
from solera.engines.vllm.transport import SHARED_MEMORY
from solera.models.digest import describe
from solera.records import Completion, Sampling
from solera.run.parts import load_parts, resolved
from solera.run.ranking import open_engines
from tests.command import ROOT, SEARCH_PATH
from tests.test_account import assert_the_checkpoint_agrees
from tests.vllm.conftest import SMALL, forward_logp, model_of, weights_of
from tests.vllm.test_commands import alive, rows

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]
PROMPT = tuple(range(4, 9))
LIMIT = 900.0
"""Seconds in which a server must be back, on a busy machine."""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the environments of all processes contain that a test starts."""
    monkeypatch.setenv("SOLERA_TEST_MARK", f"actors-{os.getpid()}-{time.time_ns()}")
    return f"SOLERA_TEST_MARK={os.environ['SOLERA_TEST_MARK']}"


class Opened:
    """One server in one actor, and an event loop as a run has."""

    def __init__(self, folder: Path) -> None:
        config = Config(engine=EngineConfig("vllm", args=SMALL, timeout=600.0), cluster=ClusterConfig(engines=1))
        self.said, self.counted = list[str](), list[int]()
        parts = load_parts(resolved(override(config, "run", name="actors")), say=self.said.append)
        self.pool: EnginePool = open_engines(parts, folder, self.counted.append)
        self.events = asyncio.new_event_loop()
        threading.Thread(target=self.events.run_forever, daemon=True).start()

    def write(self, requests: int) -> list[Completion]:
        async def ask() -> list[Completion]:
            asked = (self.pool.generate(PROMPT, Sampling(1.0, 8), seed) for seed in range(requests))
            return await asyncio.gather(*asked)

        return asyncio.run_coroutine_threadsafe(ask(), self.events).result(LIMIT)

    def publish(self, version: int) -> None:
        held = self.pool.load(weights_of(version))
        assert (held.lineage, held.version) == ("run", version)
        assert set(held.tensors) == set(describe(model_of(version).named_parameters()))


@pytest.fixture
def opened(mark: str, tmp_path: Path) -> Iterator[Opened]:
    made = Opened(tmp_path)
    yield made
    made.pool.close()
    made.events.call_soon_threadsafe(made.events.stop)


def servers(mark: str) -> list[int]:
    """The processes of vLLM servers, without their watchdogs."""
    return [pid for pid, command in alive(mark).items() if "VLLM" in command or " serve " in command]


def test_a_server_in_an_actor_holds_what_was_sent_and_comes_back_with_it(opened: Opened, mark: str) -> None:
    for version in (1, 2):
        opened.publish(version)
        for each in opened.write(6):
            assert each.versions == ((len(each.token_ids_T), version),)
            expected_T = forward_logp(version, PROMPT, each.token_ids_T, 1.0)
            assert np.allclose(each.behaviour_logp_T, expected_T, atol=1e-3)
    returned = sum(len(each.token_ids_T) for each in opened.write(4))
    assert opened.pool.sampled == opened.counted[-1] >= returned
    before = servers(mark)
    assert before
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    answers = opened.write(6)  # they wait until the server is back
    assert all(each.versions == ((len(each.token_ids_T), 2),) for each in answers)
    assert any("is set aside" in sentence for sentence in opened.said)
    assert any("is back with the weights of version 2" in sentence for sentence in opened.said)
    assert not {*servers(mark)} & {*before}
    opened.pool.close()
    deadline = time.monotonic() + 30
    while servers(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not servers(mark) and not list(SHARED_MEMORY.glob(f"solera-*{os.getpid()}*"))


def test_a_run_whose_engine_is_a_server_in_an_actor(mark: str, tmp_path: Path) -> None:
    words = [
        "train", ROOT / "recipes" / "demo.toml", "--engine", "vllm", "--cluster.engines", 1, "--run.root", tmp_path,
        "--run.name", "run", "--evaluate.problems", 20, "--evaluate.every", 4, "--sync.period", 2, "--run.steps", 4,
        "--checkpoint.every", 2, *(f"--engine.args={each}" for each in SMALL),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "solera.cli", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "1 engines generate: engine 0 (process" in said and "evaluation runs on the engines" in said
    metrics = rows(tmp_path / "run")
    syncs = [row for row in metrics if "sync/faults" in row]
    assert len(syncs) >= 2 and not any(row["sync/faults"] for row in syncs)
    assert max(row["mismatch/logp"] for row in metrics if "mismatch/logp" in row) < 1e-3
    assert assert_the_checkpoint_agrees(tmp_path / "run").difference == 0
    assert (tmp_path / "run" / "server" / "vllm.log").is_file()
    deadline = time.monotonic() + 60
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.5)
    left = {pid: command for pid, command in alive(mark).items() if pid != os.getpid()}
    assert not left, left
