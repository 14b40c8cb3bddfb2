"""How a tensor gets into a Ray actor: through Ray's object store, through a process group, or as a CUDA handle if both
use the same GPU."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from solera.config import Transport
from solera.engines.groups import TensorGroup

Way = Literal["store", "handle", "gloo", "nccl"]


class Handle(NamedTuple):
    """A tensor in the memory of a GPU, for another process on the same machine. Nothing is copied on the way."""

    rebuild: Callable[..., Tensor]
    given: tuple[Any, ...]


class Announced(NamedTuple):
    """A tensor that is sent through a group at the same time."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Sent = Tensor | Handle | Announced


def way(transport: Transport, here: str, there: str) -> Way:
    """How a tensor goes from one GPU to another (`gpu_of`, empty for a CPU). NCCL does not connect a GPU to itself.

    >>> way("auto", "GPU-1", "GPU-1"), way("auto", "GPU-1", "GPU-2"), way("auto", "", ""), way("group", "", "")
    ('handle', 'nccl', 'store', 'gloo')
    """
    if transport == "store":
        return "store"
    if here and there and here != there:
        return "nccl"
    if transport == "group":
        return "gloo"
    return "handle" if here and here == there else "store"


def packed(tensor: Tensor, how: Way) -> Sent:
    """What a Ray call carries."""
    if how in ("gloo", "nccl"):
        return Announced(tuple(tensor.shape), tensor.dtype)
    if how == "store":
        return tensor.detach().cpu()
    torch.cuda.current_stream(tensor.device).synchronize()
    return Handle(*reduce_tensor(tensor.detach()))


def unpacked(sent: Sent, group: TensorGroup | None) -> Tensor:
    """The tensor, in the actor."""
    if isinstance(sent, Announced):
        assert group is not None, "meet comes first"
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=group.device)
        group.broadcast(tensor)
        return tensor
    return sent.rebuild(*sent.given) if isinstance(sent, Handle) else sent
