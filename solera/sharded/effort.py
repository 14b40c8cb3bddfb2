"""What a rank did in an update, and how long it waited for the others."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Waiting:
    """The seconds that a rank has spent in collective operations. Most of them are spent waiting for a slower rank. On
    a GPU, the rank may compute meanwhile.

    >>> waiting = Waiting()
    >>> with waiting:
    ...     time.sleep(0.01)
    >>> 0.01 <= waiting.seconds < 1
    True
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Before and after each operation of a GPU that is not in `_seconds` yet."""

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    @contextmanager
    def on_gpu(self) -> Iterator[None]:
        """Like `with waiting`, for an operation that this thread only passes to the GPU."""
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        yield
        after.record()
        self._marks.append((before, after))

    @property
    def seconds(self) -> float:
        """Waits until the GPU has done the operations that it was given."""
        marks, self._marks = self._marks, []
        for before, after in marks:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        return self._seconds


class Collective:
    """What FSDP calls to gather weights or to reduce gradients, timed. The call returns when it is done, or, with
    tensors on a GPU, when the GPU knows of it."""

    def __init__(self, function: Any, waiting: Waiting) -> None:
        self.function, self.waiting = function, waiting

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *given: Any, **named: Any) -> Any:
        with self.waiting.on_gpu() if output_tensor.is_cuda else self.waiting:
            return self.function(output_tensor, input_tensor, *given, **named)


def gather_timed(waiting: Waiting) -> Collective:
    return Collective(_named("all_gather_single", "all_gather_into_tensor"), waiting)


def reduce_timed(waiting: Waiting) -> Collective:
    return Collective(_named("reduce_scatter_single", "reduce_scatter_tensor"), waiting)


def _named(name: str, before: str) -> Any:
    """The function has another name since torch 2.13."""
    return getattr(dist, name, None) or getattr(dist, before)


@dataclass(frozen=True)
class Effort:
    """What one rank needed for an update."""

    tokens: int
    """Tokens of the texts that it was given."""
    waiting: float
    """Seconds in collective operations."""
    memory: float
    """The most memory that its process has held so far, in GiB; of the GPU, if it has one."""

    def metrics(self, rank: int) -> dict[str, float]:
        """
        >>> Effort(200, 0.25, 1.5).metrics(0)
        {'rank/0/tokens': 200.0, 'rank/0/waiting': 0.25, 'rank/0/memory': 1.5}
        """
        return {f"rank/{rank}/{name}": float(value) for name, value in vars(self).items()}


def peak_memory(device: torch.device) -> float:
    """The most memory that this process has held, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return int(found[1]) / 2**20
