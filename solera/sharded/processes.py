"""Ranks as processes on this machine: how they are started, called, watched and ended.

A rank that dies or hangs ends all ranks, and the error names it. When the controller dies, the ranks end themselves.
"""

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from solera.errors import SoleraError, one_line
from solera.sharded.rank import STARTING, Seat

GRACE = 3.0
"""Seconds after a rank's failure in which the others may report theirs, before all are ended. The first to report is
often not the one that caused it."""


class RankError(SoleraError):
    """A rank died, hangs, or failed. All ranks have ended."""


class Processes:
    """One process for each rank. `make(seat)` runs in each of them; its result is the object that is called."""

    def __init__(self, count: int, make: Callable[[Seat], Any], timeout: float = 60.0) -> None:
        self.count, self.timeout = count, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="solera-ranks-")
        address = (Path(self._folder.name) / "meeting").as_uri()
        threads = max(1, torch.get_num_threads() // count)
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            seat = Seat(rank, count, address, timeout, threads)
            process = context.Process(target=_serve, args=(theirs, make, seat), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()  # otherwise the end of the process would not be the end of the connection
            self._connections.append(ours)
            self.processes.append(process)
        self._answers("start", time.monotonic() + STARTING)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on every rank, each with its own arguments; return what each returned."""
        if not self._connections:
            raise RankError("the learner's ranks have ended: resume the run to start them again")
        for rank, (connection, given) in enumerate(zip(self._connections, arguments, strict=True)):
            try:
                connection.send_bytes(pickle.dumps((method, given)))
            except OSError:
                self._fail(f"rank {rank} {self._how_it_ended(rank)} before {method}")
        return self._answers(method, None)

    def close(self) -> None:
        """End all ranks. Their work is lost."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._folder.cleanup()

    def _answers(self, method: str, deadline: float | None) -> list[Any]:
        """Every rank's result. After the first result the other ranks have `timeout` seconds."""
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        died: list[int] = []
        while len(results) + len(failures) + len(died) < self.count:
            waiting = [rank for rank in range(self.count) if rank not in {*results, *failures, *died}]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([self._connections[rank] for rank in waiting], left)
            if not ready:
                break
            for rank in waiting:
                if self._connections[rank] not in ready:
                    continue
                try:
                    kind, value = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, OSError):
                    died.append(rank)
                    continue
                (results if kind == "result" else failures)[rank] = value
            soon = time.monotonic() + (min(GRACE, self.timeout) if failures or died else self.timeout)
            deadline = soon if deadline is None or failures or died else min(deadline, soon)
        if len(results) < self.count:
            silent = [rank for rank in range(self.count) if rank not in {*results, *failures, *died}]
            self._fail(self._blame(method, failures, died, silent))
        return [results[rank] for rank in range(self.count)]

    def _blame(self, method: str, failures: dict[int, tuple[str, str]], died: list[int], silent: list[int]) -> str:
        """What happened, as far as the ranks tell. A rank that lost contact to another is not the one to blame."""
        told = {}
        for rank, (cause, text) in failures.items():
            told[cause] = text if cause == "user" else f"rank {rank} of {self.count} failed in {method}: {text}"
        if "user" in told:
            return told["user"]
        if "own" in told:
            return told["own"]
        if died:
            return f"rank {died[0]} of {self.count} {self._how_it_ended(died[0])} in {method}"
        if silent:
            named = " and ".join(f"rank {rank}" for rank in silent)
            return f"{named} of {self.count} did not answer in {method} (time limit {self.timeout:g} s)"
        return told["contact"]

    def _how_it_ended(self, rank: int) -> str:
        self.processes[rank].join(GRACE)
        code = self.processes[rank].exitcode
        return f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"

    def _fail(self, why: str) -> None:
        self.close()
        raise RankError(why)


def _serve(connection: Connection, make: Callable[[Seat], Any], seat: Seat) -> None:
    """Run a rank: answer calls until one fails, the controller closes the connection, or the controller dies."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whatever its name resolves to
    threading.Thread(target=_end_with_the_controller, daemon=True).start()
    served: Any = None
    function: Callable[..., Any] = make
    given: tuple[Any, ...] = (seat,)
    try:
        while True:
            value = function(*given)
            served, value = (value, None) if served is None else (served, value)
            connection.send_bytes(pickle.dumps(("result", value)))
            method, given = pickle.loads(connection.recv_bytes())
            function = getattr(served, method)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the controller has ended
    except Exception as error:
        connection.send_bytes(pickle.dumps(("failure", (_cause(error), one_line(error)))))
    os._exit(0)  # not through torch's end of a process group, which may wait for ranks that are gone


def _cause(error: Exception) -> str:
    """`user` is an error with a message for users. `contact` means that another rank was not heard of in time."""
    if isinstance(error, SoleraError):
        return "user"
    of_group = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
    return "contact" if of_group else "own"


def _end_with_the_controller() -> None:
    controller = multiprocessing.parent_process()
    assert controller is not None
    wait([controller.sentinel])
    os._exit(1)
