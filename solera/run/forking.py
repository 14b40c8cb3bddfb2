"""Processes that start with torch loaded.

On Linux, a server process imports torch and transformers once and forks a process for each task. A new Python needs
about ten seconds for these imports. Elsewhere, each task starts a new Python.

The server is itself a fork of its caller. Start it before the caller starts threads, locks files or uses a GPU: a fork
loses threads, keeps locked files open, and cannot use a GPU that was used before.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from solera.errors import SoleraError

PRELOAD = (
    "solera.run.running",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)


class Job(Protocol):
    """A process that was started: the part of `multiprocessing.Process` that callers need."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def join(self) -> None: ...


class Processes:
    """Starts processes. If the caller ends first, however it ends, each of them gets the signal `stop`."""

    def __init__(self, stop: signal.Signals, threads: int = 1) -> None:
        """`threads` is OMP_NUM_THREADS while the server loads torch. A task may change the number later."""
        self._stop = stop
        self._server = Server(stop, threads) if sys.platform == "linux" else None

    def start(self, task: Callable[..., object], *arguments: Any) -> Job:
        """Call a function of a module in a new process."""
        if self._server:
            return self._server.start(task, arguments)
        given = (None, self._stop, task, arguments)
        job = multiprocessing.get_context("spawn").Process(target=_run, args=given)
        job.start()
        return job

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            self._server.end()


class Server:
    """The caller's side of the server process."""

    def __init__(self, stop: signal.Signals, threads: int) -> None:
        self._requests, requests = multiprocessing.Pipe()
        caller, self._alive = multiprocessing.Pipe(duplex=False)  # only the caller holds the end for writing
        self._statuses: dict[int, int] = {}
        sys.stdout.flush()  # otherwise the server's copy would be written, too
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            self._requests.close()
            self._alive.close()
            _serve(requests, caller, stop, threads)
        requests.close()
        caller.close()

    def start(self, task: Callable[..., object], arguments: tuple[Any, ...]) -> "Forked":
        with _told_if_gone():
            self._requests.send((task, arguments))
        while (pid := self._receive()) is None:
            continue
        return Forked(self, pid)

    def status_of(self, pid: int, patience: float | None) -> int | None:
        """Exit status of a process; `None` if it still runs after so many seconds."""
        while pid not in self._statuses and self._requests.poll(patience):
            self._receive()
        return self._statuses.get(pid)

    def _receive(self) -> int | None:
        """Read one message of the server: the id of a new process, or the status of one that has ended."""
        with _told_if_gone():
            pid, status = self._requests.recv()
        if status is None:
            return pid
        self._statuses[pid] = status
        return None

    def end(self) -> None:
        self._alive.close()
        self._requests.close()
        os.kill(self._pid, signal.SIGKILL)  # it may still be importing
        os.waitpid(self._pid, 0)


@contextmanager
def _told_if_gone() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise SoleraError(
            "the process that starts the others was killed, perhaps because memory ran out: run the command again"
        ) from None


class Forked:
    """A process that the server forked."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self._server = server

    @property
    def exitcode(self) -> int | None:
        return self._server.status_of(self.pid, 0.0)

    def join(self) -> None:
        self._server.status_of(self.pid, None)


def _serve(requests: Connection, caller: Connection, stop: signal.Signals, threads: int) -> None:
    """Fork a process for each request, until the caller is gone."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _load(threads)
        jobs: dict[Any, multiprocessing.process.BaseProcess] = {}
        while True:
            for ready in wait([requests, *jobs]):
                if ready is not requests:
                    job = jobs.pop(ready)
                    job.join()
                    requests.send((job.pid, job.exitcode))
                    continue
                given = (requests, caller, stop, *requests.recv())
                job = multiprocessing.get_context("fork").Process(target=_run_forked, args=given)
                job.start()
                jobs[job.sentinel] = job
                requests.send((job.pid, None))
    except (EOFError, ConnectionError):  # the caller is gone
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _load(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    gc.disable()  # collecting during the imports would take a sixth of their time
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise the first collection in each fork would copy everything that was loaded
    gc.enable()


def _run_forked(requests: Connection, caller: Connection, stop: signal.Signals, task: Any, arguments: Any) -> None:
    requests.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run(caller, stop, task, arguments)


def _run(caller: Connection | None, stop: signal.Signals, task: Any, arguments: Any) -> None:
    threading.Thread(target=_stop_with_the_caller, args=(caller, stop), daemon=True).start()
    task(*arguments)


def _stop_with_the_caller(caller: Connection | None, stop: signal.Signals) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([caller or parent.sentinel])
    os.kill(os.getpid(), stop)
