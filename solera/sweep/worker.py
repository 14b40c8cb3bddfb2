"""A process for one run: it trains as `solera train` does, and stops when its sweep is gone."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from solera.config import dump
from solera.sweep.plan import PlannedRun
from solera.sweep.state import at_work

LINUX = sys.platform == "linux"
PROCESSES = multiprocessing.get_context("forkserver") if LINUX else multiprocessing.get_context("spawn")
"""On Linux a server loads torch and transformers once, and each run is a fork of it: seconds less for every run."""
PROCESSES.set_forkserver_preload(
    [
        "solera.run.running",
        "torch._dynamo",
        "transformers.modeling_utils",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
    ]
)


Command = Callable[[list[str]], int]
"""`solera` as a function: from its arguments to its exit status."""


class Worker:
    """A running run."""

    def __init__(self, run: PlannedRun, sweep: Path, command: Command) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it loads torch; `run.threads` counts in the run
        self.run = run
        self.log = _below(sweep, "logs", f"{run.name}.log")
        self.log.write_bytes(b"")  # what an earlier attempt said is not this one's last line
        self._process = PROCESSES.Process(target=train, args=(command, _arguments(run, sweep), self.log, sweep))
        self._process.start()

    @property
    def status(self) -> int | None:
        """Exit status; `None` while it runs, negative where a signal killed it."""
        return self._process.exitcode

    def interrupt(self) -> None:
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGINT)

    def wait(self) -> None:
        self._process.join()

    def last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return said.removeprefix("solera: ")


def train(command: Command, arguments: list[str], log: Path, sweep: Path) -> None:
    """What the process does."""
    os.setpgid(0, 0)  # or a terminal's Ctrl-C would reach it twice: once more through the sweep
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    threading.Thread(target=_stop_with_the_sweep, daemon=True).start()
    with at_work(sweep):
        sys.exit(command(["train", *arguments]))


def _stop_with_the_sweep() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def _arguments(run: PlannedRun, sweep: Path) -> list[str]:
    if run.folder.exists():
        return ["--resume", str(run.folder)]
    file = _below(sweep, "configs", f"{run.name}.toml")
    file.write_text(dump(run.config), encoding="utf-8")
    return [str(file)]


def _below(sweep: Path, folder: str, name: str) -> Path:
    (sweep / folder).mkdir(exist_ok=True)
    return sweep / folder / name
