"""Servers that a run starts, as far as this can be tested where vLLM is not installed."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from solera.config import Config, EngineConfig
from solera.engines.vllm import transport, watchdog
from solera.engines.vllm.transport import FileTransport
from solera.run import serving


@pytest.fixture
def little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))


def test_a_server_that_ends_leaves_the_weights_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little_shared_memory: None
) -> None:
    """Its watchdog removes the folder through which it got weights, while another server fetches an update."""
    folders = list[Path]()

    def start(*_: Any, passing: Path, **__: Any) -> SimpleNamespace:
        folders.append(passing)
        return SimpleNamespace(url="http://server", close=lambda: None)

    monkeypatch.setattr(serving.launch, "launch", start)
    for name in ("obtain", "base_of"):
        monkeypatch.setattr(serving, name, lambda path: path)
    monkeypatch.setattr(serving, "ours_of", lambda *_: SimpleNamespace(dtype="float32", max_length=64))
    monkeypatch.setattr(serving, "size_of", lambda parts: 1)
    monkeypatch.setattr(serving, "open_server", lambda *_: SimpleNamespace(http=SimpleNamespace(url="http://server")))
    parts: Any = SimpleNamespace(
        config=Config(engine=EngineConfig("vllm", launch=2)), say=print,
        model=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    for number in range(2):
        serving._launch(parts, "model", 8, tmp_path, number)
    offered = [FileTransport(folder, n).offer("run/1/a", {"w": torch.ones(2)}) for n, folder in enumerate(folders)]
    subprocess.run([sys.executable, watchdog.__file__, str(os.getpid()), str(folders[1]), "true"], check=True)
    assert [Path(each["path"]).exists() for each in offered] == [True, False]


def test_weights_that_a_killed_run_has_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weights", "weights-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0-solera-run-7.safetensors").write_bytes(b"0")
    monkeypatch.setattr(serving, "EnginePool", lambda opens, **_: len(opens))
    parts: Any = SimpleNamespace(
        config=Config(engine=EngineConfig("vllm", launch=2)), model=SimpleNamespace(adapter=None), say=print
    )
    assert serving.open_servers(parts, "model", 8, tmp_path, serving.Counts()) == 2
    assert list(tmp_path.iterdir()) == []
