"""A process for one run. It trains like `solera train`, and stops when its sweep is gone."""

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
"""On Linux, a server process loads torch and transformers once, and each run is forked from it. This saves a few
seconds per run."""
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
"""`solera` as a function from its arguments to its exit status."""


class Worker:
    """An active run."""

    def __init__(self, run: PlannedRun, sweep: Path, command: Command) -> None:
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # read by the server process when it loads torch; in the run, `run.threads` applies
        )
        self.run = run
        self.log = _below(sweep, "logs", f"{run.name}.log")
        self.log.write_bytes(b"")  # the sweep prints the log's last line, which must not come from an earlier attempt
        self._process = PROCESSES.Process(target=train, args=(command, _arguments(run, sweep), self.log, sweep))
        self._process.start()

    @property
    def status(self) -> int | None:
        """Exit status; `None` while it runs, negative if a signal killed it."""
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
    """The main function of the process."""
    os.setpgid(0, 0)  # otherwise Ctrl-C in a terminal reaches it twice, directly and through the sweep
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
