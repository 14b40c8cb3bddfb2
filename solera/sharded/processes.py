"""Ranks as processes on this machine. When the controller dies, they end themselves."""

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from solera.sharded.rank import Seat
from solera.sharded.ranks import BEAT, GRACE, Reply, Served, SilentError


class Processes:
    """One process for each rank. `make(seat)` runs in each of them; its result is the object that is called."""

    def __init__(self, count: int, make: Callable[[Seat], Any], timeout: float) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="solera-ranks-")
        address = (Path(self._folder.name) / "meeting").as_uri()
        threads = max(1, torch.get_num_threads() // count)
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._beats: list[Connection] = []
        self._pulses: dict[int, float] = {}
        self.processes: list[Any] = []
        # Otherwise a program that does not close its ranks would wait for them for ever: they ignore SIGTERM.
        atexit.register(_end, self.processes)
        for rank in range(count):
            (ours, theirs), (beats, beating) = context.Pipe(), context.Pipe(duplex=False)
            made = partial(make, Seat(rank, count, address, timeout, threads))
            process = context.Process(target=_serve, args=(theirs, beating, made), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()  # otherwise the end of the process would not be the end of the connection
            beating.close()
            limit(ours, timeout + 2 * GRACE)
            self._connections.append(ours)
            self._beats.append(beats)
            self.processes.append(process)

    def send(self, rank: int, call: bytes) -> None:
        try:
            self._connections[rank].send_bytes(call)
        except BlockingIOError as error:
            raise SilentError(rank) from error

    def wait(self, ranks: Sequence[int], seconds: float | None) -> dict[int, Reply | None]:
        ready = wait([self._connections[rank] for rank in ranks], seconds)
        return {rank: self._received(rank) for rank in ranks if self._connections[rank] in ready}

    def pulses(self) -> dict[int, float]:
        for rank, beats in enumerate(self._beats):
            with suppress(EOFError, OSError):  # it has died, which `wait` tells
                while beats.poll():
                    self._pulses[rank] = beats.recv()
        return self._pulses

    def signal_of(self, rank: int) -> int | None:
        self.processes[rank].join(GRACE)
        code = self.processes[rank].exitcode
        return -code if code is not None and code < 0 else None

    def how_it_ended(self, rank: int) -> str:
        number = self.signal_of(rank)
        return (
            f"ended with status {self.processes[rank].exitcode}" if number is None else f"was ended by signal {number}"
        )

    def where(self) -> str:
        return f"processes {', '.join(str(process.pid) for process in self.processes)}"

    def close(self) -> None:
        _end(self.processes)
        for connection in (*self._connections, *self._beats):
            connection.close()
        self._folder.cleanup()

    def _received(self, rank: int) -> Reply | None:
        try:
            return receive(self._connections[rank])
        except BlockingIOError as error:
            raise SilentError(rank) from error
        except (EOFError, OSError):
            return None


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def limit(connection: Connection, seconds: float) -> None:
    """Let reads and writes fail with a `BlockingIOError` if the other end does nothing for so long: a stopped process
    keeps its connection open, and what it does not read fills the connection's buffer."""
    packed = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            other.setsockopt(socket.SOL_SOCKET, option, packed)


def send(connection: Connection, reply: Reply) -> None:
    """The arrays follow the pickle as they are."""
    connection.send_bytes(pickle.dumps((reply.pickled, [array.nbytes for array in reply.arrays])))
    for array in reply.arrays:
        left = array.data
        while left:
            left = left[os.write(connection.fileno(), left) :]


def receive(connection: Connection) -> Reply:
    """Reads each array into its place. `recv_bytes` would first collect its pieces in other memory."""
    pickled, sizes = pickle.loads(connection.recv_bytes())
    arrays = tuple(np.empty(size, np.uint8) for size in sizes)
    for array in arrays:
        left = array.data
        while left:
            if not (came := os.readv(connection.fileno(), [left])):
                raise EOFError
            left = left[came:]
    return Reply(pickled, arrays)


def _serve(connection: Connection, beating: Connection, make: Callable[[], Any]) -> None:
    """Run a rank: answer calls until the controller closes the connection or dies."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whatever its name resolves to
    for number in (signal.SIGINT, signal.SIGTERM):  # reach the whole group; the controller finishes its step
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_controller, daemon=True).start()
    served = Served()
    threading.Thread(target=_beat, args=(served, beating), daemon=True).start()
    try:
        send(connection, served.start(make))
        while True:
            send(connection, served.call(connection.recv_bytes()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the controller has ended
    os._exit(0)  # not through torch's end of a process group, which may wait for ranks that are gone


def _beat(served: Served, beating: Connection) -> None:
    """Tell the controller again and again that this process runs, and what its rank has computed."""
    with suppress(OSError):  # the controller has ended
        while True:
            beating.send(served.pulse())
            time.sleep(BEAT)


def _end_with_the_controller() -> None:
    controller = multiprocessing.parent_process()
    assert controller is not None
    wait([controller.sentinel])
    os._exit(1)
