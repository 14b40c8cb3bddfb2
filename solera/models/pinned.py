"""Memory from which a GPU copies by itself, while the host goes on."""

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor that `.to(device, non_blocking=True)` copies without waiting for what the device is doing. From other
    memory, the host would wait for it."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def in_cpu_memory(tensor: Tensor) -> Tensor:
    """A tensor of a GPU is copied into pinned memory, which is several times as fast as into other memory. Torch keeps
    such memory for the next copy."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
