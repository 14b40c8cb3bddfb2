"""Copies between the host and the GPU that nobody waits for before they are needed."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from solera.models.pinned import pinned


class Arriving:
    """Tensors on their way from the GPU: nobody waits for them before they are read."""

    def __init__(self, *tensors: Tensor) -> None:
        self.event = torch.cuda.Event() if tensors[0].is_cuda else None
        self.tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        for here, there in zip(self.tensors, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> list[npt.NDArray[Any]]:
        if self.event is not None:
            self.event.synchronize()
        return [tensor.clone().numpy() for tensor in self.tensors]  # memory that the GPU can reach is not kept


def sent(values: list[Any] | npt.NDArray[Any], device: torch.device) -> Tensor:
    """Numbers as a tensor on the device, without waiting for what it is doing. Those of a list are whole."""
    tensor = torch.tensor(values, dtype=torch.int64) if isinstance(values, list) else torch.from_numpy(values)
    return pinned(tensor, device).to(device, non_blocking=True)
