"""How tensors get into a Ray actor: through Ray's object store, through a process group, or as a CUDA handle if both
use the same GPU."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from solera.config import Transport
from solera.engines.groups import TensorGroup
from solera.engines.messages import Part, messages

Way = Literal["store", "handle", "gloo", "nccl"]


class Handle(NamedTuple):
    """A tensor in the memory of a GPU, for another process on the same machine. Nothing is copied on the way."""

    rebuild: Callable[..., Tensor]
    given: tuple[Any, ...]


class Announced(NamedTuple):
    """A tensor that is sent through a group at the same time."""

    group: str
    """The sender's name for it."""
    shape: tuple[int, ...]
    dtype: torch.dtype


Sent = Tensor | Handle | Announced


class Message(NamedTuple):
    """What a Ray call carries."""

    parts: tuple[Part, ...]
    sent: Sent


def divided(named: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each message, in their order."""
    for several in messages(named, lambda pair: pair[1].nbytes, lambda pair: (pair[1].dtype, pair[1].device)):
        yield dict(several)


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


def packed(tensor: Tensor, how: Way, group: str = "") -> Sent:
    """What a Ray call carries. `group` is the one that the tensor goes through, if it goes through one."""
    if how in ("gloo", "nccl"):
        return Announced(group, tuple(tensor.shape), tensor.dtype)
    if how == "store":
        return tensor.detach().cpu()
    torch.cuda.current_stream(tensor.device).synchronize()
    return Handle(*reduce_tensor(tensor.detach()))


def unpacked(sent: Sent, groups: Mapping[str, TensorGroup]) -> Tensor:
    """The tensor, in the actor."""
    if isinstance(sent, Announced):
        group = groups[sent.group]
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=group.device)
        group.broadcast(tensor)
        return tensor
    return sent.rebuild(*sent.given) if isinstance(sent, Handle) else sent
