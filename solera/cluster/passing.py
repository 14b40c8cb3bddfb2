"""How a tensor gets into a Ray actor: through Ray's object store, or as a CUDA handle if both use the same GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from solera.sharded.rank import gpu_of


class Handle(NamedTuple):
    """A tensor in the memory of a GPU, for another process on the same machine. Nothing is copied on the way."""

    rebuild: Callable[..., Tensor]
    given: tuple[Any, ...]


def packed(tensor: Tensor, gpu: str) -> Tensor | Handle:
    """What to send to a process that computes on this GPU; the name is empty for a CPU."""
    if tensor.is_cuda and gpu_of(tensor.device) == gpu:
        torch.cuda.current_stream(tensor.device).synchronize()
        return Handle(*reduce_tensor(tensor.detach()))
    return tensor.detach().cpu()


def unpacked(sent: Tensor | Handle) -> Tensor:
    return sent.rebuild(*sent.given) if isinstance(sent, Handle) else sent
