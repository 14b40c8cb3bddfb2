"""Memory from which a GPU copies by itself, while the host goes on."""

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor that `.to(device, non_blocking=True)` copies without waiting for what the device is doing. From other
    memory, the host would wait for it."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
