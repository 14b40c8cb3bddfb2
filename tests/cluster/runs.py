"""Short runs of `solera train` with several ranks, and what the tests look at in them."""

import time
from pathlib import Path

import torch

from solera.models import loading
from solera.report.sinks import read_metrics
from tests.command import solera
from tests.test_resume import RUN


def write(tmp_path: Path, name: str, learners: int = 2, runtime: str = "processes", **cluster: object) -> Path:
    settings = {"learners": learners, "timeout": 60.0, **cluster} | ({"runtime": f'"{runtime}"'} if learners else {})
    file = tmp_path / f"{name}.toml"
    line = ", ".join(f"{key} = {value}" for key, value in settings.items())
    every = RUN.format(root=tmp_path, name=name, every=4)
    file.write_text(every + (f"cluster = {{ {line} }}\n" if learners else ""))
    return file


def train(tmp_path: Path, name: str, learners: int = 2, runtime: str = "processes", **cluster: object) -> Path:
    ended = solera("train", write(tmp_path, name, learners, runtime, **cluster))
    assert ended.returncode == 0, ended.stderr
    return tmp_path / name


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "rank/"))}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(loading.load(str(folder / "model"), torch.device("cpu"))[0].parameters())


def assert_same(folder: Path, expected: Path) -> None:
    """Bit for bit."""
    assert rows_of(folder) == rows_of(expected)
    for name, tensor in weights_of(expected).items():
        assert torch.equal(weights_of(folder)[name], tensor), name


def reached(folder: Path, rows: int, process, seconds: float = 600.0) -> None:
    """Wait until a run has logged that many rows."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(read_metrics(folder / "metrics.jsonl")) >= rows:
            return
        time.sleep(0.02)
    raise AssertionError(f"the run did not reach row {rows}")


def ranks_of(process) -> list[int]:
    """The processes of a run's ranks, found by their command lines and their parents."""
    found, parents = [], {process.pid}
    for _ in range(4):  # Ray's actors are grandchildren
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            pid = int(entry.name)
            if parent in parents and pid not in parents:
                parents.add(pid)
                if "spawn_main" in command or command.startswith("ray::Actor"):
                    found.append(pid)
    return sorted(found)
