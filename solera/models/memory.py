"""How much GPU memory this process may use."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

RECORDING = threading.RLock()
"""Held by a thread that records a CUDA graph, and by one that does what CUDA or torch refuse while another thread
records: to wait for the whole GPU, as a learner and an engine do for what they compile, and to give back torch's unused
memory."""

RECORDED_SHARE = 1 / 8
"""Most of the GPU's memory for what recorded graphs compute with. Nothing else can use it."""

_SET_ASIDE = weakref.WeakKeyDictionary[object, int]()


def set_aside(owner: object, nbytes: int) -> None:
    """Do not count so many bytes as free as long as `owner` exists. Torch counts memory of CUDA graphs as unused, but
    nobody else can use it. Set aside before they are recorded, what is free does not depend on when that is."""
    _SET_ASIDE[owner] = nbytes


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free, plus what torch holds unused, within this process's limit (`run.gpu_memory`)."""
    number = _number(device)
    free, _ = torch.cuda.mem_get_info(number)
    held = torch.cuda.memory_allocated(number)
    unused = torch.cuda.memory_reserved(number) - held
    return max(0, min(free + unused, allowed_bytes(device) - held) - sum(_SET_ASIDE.values()))


def allowed_bytes(device: torch.device) -> int:
    """Return the most memory that this process may use."""
    number = _number(device)
    _, total = torch.cuda.mem_get_info(number)
    return int(torch.cuda.get_per_process_memory_fraction(number) * total)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record what is started meanwhile, while other threads may use the GPU.

    `torch.cuda.graph` first waits for the whole GPU and gives back all unused memory, because torch cannot do that
    while it records. That holds up everything else on a busy GPU. So here it happens only if torch can take less from
    the GPU than it holds unused. What is recorded was computed just before, so it needs no more than that.
    """
    number = _number(stream.device)
    if _left(stream.device) < torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number):
        torch.cuda.synchronize(stream.device)
        torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def _left(device: torch.device) -> int:
    """Bytes that torch can still take from the GPU, within this process's limit."""
    number = _number(device)
    free, _ = torch.cuda.mem_get_info(number)
    return min(free, allowed_bytes(device) - torch.cuda.memory_reserved(number))


@contextmanager
def limited(device: torch.device, gibibytes: float | None) -> Iterator[None]:
    """Limit the GPU memory of this process if `run.gpu_memory` is set; restore the old limit afterwards."""
    if gibibytes is None or device.type != "cuda":
        yield
        return
    number = _number(device)
    before = torch.cuda.get_per_process_memory_fraction(number)
    _, total = torch.cuda.mem_get_info(number)
    torch.cuda.set_per_process_memory_fraction(min(1.0, gibibytes * 2**30 / total), number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, number)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
