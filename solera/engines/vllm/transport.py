"""How weights leave the trainer for a server. `receiving.py` is the other end.

Each transport keeps a copy of the last weights that were accepted, because a server cannot return them.
"""

import base64
import contextlib
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from solera.engines.groups import MeetingPoint, TensorGroup, gpu_of
from solera.engines.vllm.receiving import PATIENCE
from solera.errors import one_line

SHARED_MEMORY = Path("/dev/shm")
ROOM = 3
"""Shared memory is used if this many copies of the weights fit into it."""


class Transport(Protocol):
    """Sends one update after another. After each, exactly one of `keep` and `drop` is called."""

    name: str

    def meeting(self, workers: int) -> dict[str, Any]:
        """Where the server's workers should meet us, to be sent to them; empty if nobody has to meet."""
        ...

    def meet(self) -> None:
        """Wait for the server's workers, while they are told to come."""
        ...

    def offer(self, label: str, named: dict[str, Tensor]) -> dict[str, Any]:
        """What the server needs to fetch these tensors."""
        ...

    def send(self) -> None:
        """Whatever must happen while the server fetches them."""
        ...

    def keep(self) -> None:
        """The server has accepted what was offered."""
        ...

    def drop(self) -> None:
        """The server has refused what was offered."""
        ...

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """The last weights that were kept."""
        ...

    def close(self) -> None: ...


class FileTransport:
    """A safetensors file in a folder that both sides can read. The last file is the copy that is kept. `number` tells
    several servers apart that use the same folder."""

    name = "file"

    def __init__(self, folder: Path, number: int = 0) -> None:
        self.folder = folder
        self.number = number
        self._file: Path | None = None
        self._offered: Path | None = None

    def meeting(self, workers: int) -> dict[str, Any]:
        return {}

    def meet(self) -> None:
        return

    def offer(self, label: str, named: dict[str, Tensor]) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._offered = self.folder / f"{self.number}-{label.replace('/', '-')}.safetensors"
        try:
            save_file({name: tensor.contiguous().cpu() for name, tensor in named.items()}, self._offered)
        except SafetensorError as error:  # a full disk, as a rule
            number = re.search(r"os error (\d+)", str(error))
            said = os.strerror(int(number[1])) if number else one_line(error)
            file = str(self._offered)
            self.drop()
            raise OSError(int(number[1]) if number else errno.EIO, said, file) from error
        return {"path": str(self._offered.absolute())}

    def send(self) -> None:
        return

    def keep(self) -> None:
        if self._file is not None and self._file != self._offered:
            self._file.unlink(missing_ok=True)
        self._file, self._offered = self._offered, None

    def drop(self) -> None:
        if self._offered is not None and self._offered != self._file:
            self._offered.unlink(missing_ok=True)
        self._offered = None

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        if self._file is None:
            return
        with safe_open(self._file, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)

    def close(self) -> None:
        for file in filter(None, (self._file, self._offered)):
            file.unlink(missing_ok=True)
        self._file = self._offered = None
        with contextlib.suppress(OSError):  # another server's file is still there
            self.folder.rmdir()


class _InMemory:
    """The part that transports without a file share: a copy of the weights in this process."""

    def __init__(self) -> None:
        self._offered: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}

    def keep(self) -> None:
        self._kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._offered.items()}
        self._offered = {}

    def drop(self) -> None:
        self._offered = {}

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._kept.items()


class IpcTransport(_InMemory):
    """CUDA IPC: the server reads the learner's own GPU memory. Nothing is copied on the way."""

    name = "ipc"

    def meeting(self, workers: int) -> dict[str, Any]:
        return {}

    def meet(self) -> None:
        return

    def offer(self, label: str, named: dict[str, Tensor]) -> dict[str, Any]:
        self._offered = {name: tensor.detach().to("cuda").contiguous() for name, tensor in named.items()}
        torch.cuda.synchronize()
        return {"handles": [_handle(tensor) for tensor in self._offered.values()]}

    def send(self) -> None:
        return

    def close(self) -> None:
        self._kept = {}


def _handle(tensor: Tensor) -> dict[str, Any]:
    """The parts of a CUDA handle as JSON: no pickle, which could make the server run anything."""
    _, (_, _, stride, offset, _, _, device, memory, size, start, _, counter, counter_offset, event, sync) = (
        reduce_tensor(tensor)
    )
    return {
        "gpu": gpu_of(torch.device("cuda", device)), "stride": list(stride), "offset": offset,
        "memory": _text(memory), "size": size, "start": start, "counter": _text(counter),
        "counter_offset": counter_offset, "event": _text(event), "sync": sync,
    }  # fmt: skip


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class GroupTransport(_InMemory):
    """A broadcast from the trainer to all workers: NCCL between GPUs, gloo between CPUs."""

    name = "group"

    def __init__(self, device: torch.device, host: str) -> None:
        super().__init__()
        self.device = device
        self.host = host
        self._point: MeetingPoint | None = None
        self._size = 0
        self._group: TensorGroup | None = None

    def meeting(self, workers: int) -> dict[str, Any]:
        self._point, self._size = MeetingPoint(self.host, PATIENCE), workers + 1
        return {
            "host": self.host, "port": self._point.port, "size": self._size, "on_gpu": self.device.type == "cuda"
        }  # fmt: skip

    def meet(self) -> None:
        assert self._point is not None, "meeting comes first"
        self._group, self._point = TensorGroup(self._point, 0, self._size, self.device), None

    def offer(self, label: str, named: dict[str, Tensor]) -> dict[str, Any]:
        self._offered = {name: tensor.detach().to(self.device).contiguous() for name, tensor in named.items()}
        return {}

    def send(self) -> None:
        assert self._group is not None, "meet comes first"
        for tensor in self._offered.values():
            self._group.broadcast(tensor)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._kept = None, {}


def free_port() -> int:
    """A port that nobody listens on at the moment, and that was not given before: servers start at the same time."""
    while True:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = int(taken.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


_given = set[int]()


def transfer_folder(folder: Path, size: int) -> Path:
    """Where to put the weights for a server on this machine: in shared memory if they fit there, else in `folder`."""
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if usable and shutil.disk_usage(SHARED_MEMORY).free > ROOM * size:
        return SHARED_MEMORY / f"solera-{os.getpid()}-{os.urandom(4).hex()}"
    return folder
