"""How much of a GPU's memory is there to be taken."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_bytes(device: torch.device) -> int:
    """What is free and what torch keeps unused, within this process's limit (`run.gpu_memory`)."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - held
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + unused, limit - held))


@contextmanager
def limited(device: torch.device, gibibytes: float | None) -> Iterator[None]:
    """Where that is set, this process takes so much of a GPU and no more; afterwards as it was."""
    if gibibytes is None or device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, gibibytes * 2**30 / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
