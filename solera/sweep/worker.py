"""A process for one run. It trains like `solera train`, and stops when its sweep is gone."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from solera.config import dump
from solera.run.forking import Processes
from solera.sweep.machine import Share
from solera.sweep.plan import PlannedRun
from solera.sweep.progress import kept, learned
from solera.sweep.state import at_work

Command = Callable[[list[str]], int]
"""`solera` as a function from its arguments to its exit status."""


class Worker:
    """An active run."""

    def __init__(
        self,
        run: PlannedRun,
        sweep: Path,
        command: Command,
        share: Share,
        environment: Mapping[str, str],
        processes: Processes,
    ) -> None:
        self.run = run
        self.before = kept(run)
        """Batches that the run had learned from before it was resumed."""
        self._logged = learned(run)
        """The same, with batches after its newest checkpoint. It repeats these."""
        self.seconds = 0.0
        """How long it has been active."""
        self.together = 0.0
        """The same, with each second counted once for every run that was active then."""
        self.log = _below(sweep, "logs", f"{run.name}.log")
        self.log.write_bytes(b"")  # the sweep prints the log's last line, which must not come from an earlier attempt
        arguments = _arguments(run, sweep, share)
        self._process = processes.start(train, command, arguments, self.log, sweep, dict(environment), share)

    @property
    def status(self) -> int | None:
        """Exit status; `None` while it runs, negative if a signal killed it."""
        return self._process.exitcode

    @property
    def made(self) -> int:
        """Batches that it has learned from since it was resumed. None while it has not taken its metrics back."""
        now = learned(self.run)
        return 0 if now == self._logged else max(0, now - self.before)

    def interrupt(self) -> None:
        if self.status is None:
            assert self._process.pid is not None
            with suppress(ProcessLookupError):  # it has ended, and the server has not reported its status yet
                os.kill(self._process.pid, signal.SIGINT)

    def wait(self) -> None:
        self._process.join()

    def last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return said.removeprefix("solera: ")


def train(
    command: Command, arguments: list[str], log: Path, sweep: Path, environment: dict[str, str], share: Share
) -> None:
    """The main function of the process."""
    os.setpgid(0, 0)  # otherwise Ctrl-C in a terminal reaches it twice, directly and through the sweep
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    if share.on_gpu:
        import torch._inductor.config as compiling

        compiling.compile_threads = share.threads  # by default, each run would start a process per core
    with at_work(sweep):
        sys.exit(command(["train", *arguments]))


def _arguments(run: PlannedRun, sweep: Path, share: Share) -> list[str]:
    if run.folder.exists():
        given = share.given_to(run.config).run
        shared = ["--run.threads", str(given.threads), "--run.gpu_memory", str(given.gpu_memory)]
        return ["--resume", str(run.folder), *(shared if share.on_gpu else [])]
    file = _below(sweep, "configs", f"{run.name}.toml")
    file.write_text(dump(share.given_to(run.config)), encoding="utf-8")
    return [str(file)]


def _below(sweep: Path, folder: str, name: str) -> Path:
    (sweep / folder).mkdir(exist_ok=True)
    return sweep / folder / name
