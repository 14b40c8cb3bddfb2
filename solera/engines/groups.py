"""Process groups in which weights travel from one process to others: NCCL between GPUs, gloo between CPUs.

A group stands beside any default group of its process. If a peer dies or hangs, the group is lost and nothing else: the
call that waits for the peer raises an `EngineError`.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from solera.engines.faults import EngineError
from solera.errors import one_line

ABORTING = 5.0
"""Seconds in which a group should have ended. If it has not, nobody waits for it any more."""
_environment = threading.Lock()


class MeetingPoint:
    """Where the processes of a group find each other: a port of rank 0. Without a `port`, this process is rank 0 and
    opens one."""

    def __init__(self, host: str, timeout: float, port: int | None = None) -> None:
        from torch.distributed import TCPStore

        self.timeout = timedelta(seconds=timeout)
        try:
            self.store = TCPStore(
                host, port or 0, is_master=port is None, timeout=self.timeout, wait_for_workers=False
            )  # fmt: skip
        except RuntimeError as error:
            raise EngineError(f"no connection to {host}, port {port or 'any'}: {one_line(error)}") from error
        self.port: int = self.store.port


class TensorGroup:
    """One of `size` processes; the tensors of rank 0 go to all others. The constructor returns when all have come.

    `address` is the one by which the others know this machine. gloo would otherwise take the one that the machine's
    name resolves to. NCCL chooses by itself (`NCCL_SOCKET_IFNAME`).
    """

    def __init__(self, point: MeetingPoint, rank: int, size: int, device: torch.device, address: str = "") -> None:
        from torch import distributed

        self.device = device
        self._point: MeetingPoint | None = point
        store = distributed.PrefixStore("solera", point.store)
        with _raising("the processes did not meet"):
            store.set(f"here {rank}", "")
            store.wait([f"here {each}" for each in range(size)], point.timeout)
            self._group: Any = (
                _nccl(store, rank, size, point.timeout)
                if device.type == "cuda"
                else _gloo(store, rank, size, point.timeout, address)
            )
            try:
                self._connect(point.timeout)
            except BaseException:
                self.close()
                raise

    def _connect(self, timeout: timedelta) -> None:
        """NCCL connects when the first tensor travels. It waits for ever for a peer that dies meanwhile."""
        empty = torch.zeros(1, device=self.device)
        begin(lambda: self._group.broadcast(empty, 0).wait()).result(timeout.total_seconds())

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor, or receive it into this one. Returns when that is done."""
        group = self._group  # its destructor waits for a thread that is here
        try:
            with _raising("a tensor did not arrive"):
                group.broadcast(tensor, 0).wait()
        finally:
            del group  # the traceback of an error would keep it

    def close(self) -> None:
        """End the group, whatever it is doing. A group that is left to the end of the process can crash it."""
        group, self._group, self._point = self._group, None, None
        if group is not None:
            futures.wait([begin(group.abort)], ABORTING)  # what NCCL says about it changes nothing


def begin(work: Callable[[], Any]) -> "futures.Future[Any]":
    """Work in a thread that the end of the process does not wait for."""
    done = futures.Future[Any]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="solera-group").start()
    return done


@contextmanager
def _raising(failed: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        raise EngineError(f"{failed}: {one_line(error, 500)}") from error


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    if not address:
        return ProcessGroupGloo(store, rank, size, timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no other class takes a device
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _blocking_wait():
        return ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """A group that is made meanwhile has no watchdog, which would end this process after an error of a peer. `wait`
    raises the error instead, also after the time limit. Other groups of this process keep what they have."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def gpu_of(device: torch.device) -> str:
    """The name of a GPU, which is the same in every process; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
