"""Which tensors travel together, and how: end to end in one. A call for each small tensor would take longer."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.models.pinned import in_cpu_memory

T = TypeVar("T")
Part = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor."""
MESSAGE_BYTES = 64 << 20
"""Most bytes of the tensors of a message. A larger tensor travels alone."""


def messages(
    things: Iterable[T], size: Callable[[T], int], kind: Callable[[T], Hashable] = lambda thing: None
) -> Iterator[list[T]]:
    """Divide tensors into messages, in their order. All tensors of a message are of one kind.

    >>> list(messages([30 << 20, 30 << 20, 30 << 20, 200 << 20, 1], size=int)) == [
    ...     [30 << 20, 30 << 20], [30 << 20], [200 << 20], [1]]
    True
    """
    together, held = list[T](), 0
    for thing in things:
        if together and (held + size(thing) > MESSAGE_BYTES or kind(thing) != kind(together[0])):
            yield together
            together, held = [], 0
        together.append(thing)
        held += size(thing)
    if together:
        yield together


class Joined(NamedTuple):
    """Tensors end to end."""

    parts: tuple[Part, ...]
    whole_N: Tensor


class Copied(NamedTuple):
    """The same, as bytes in CPU memory, which are pickled faster than tensors."""

    parts: tuple[Part, ...]
    dtype: torch.dtype
    whole_N: npt.NDArray[np.uint8]


def joined(named: Mapping[str, Tensor]) -> Joined:
    """Tensors of one dtype on one device, in their order. One tensor alone is not copied."""
    parts = tuple((name, tuple(tensor.shape)) for name, tensor in named.items())
    flat = [tensor.detach().reshape(-1) for tensor in named.values()]
    return Joined(parts, flat[0] if len(flat) == 1 else torch.cat(flat))


def parted(parts: tuple[Part, ...], whole_N: Tensor) -> dict[str, Tensor]:
    """The tensors again, without a copy.

    >>> {name: part.tolist() for name, part in parted((("a", (2,)), ("b", ())), torch.tensor([1, 2, 3])).items()}
    {'a': [1, 2], 'b': 3}
    """
    pieces = whole_N.split([prod(shape) for _, shape in parts])
    return {name: piece.view(shape) for (name, shape), piece in zip(parts, pieces, strict=True)}


def copied(tensors: Joined) -> Copied:
    return Copied(tensors.parts, tensors.whole_N.dtype, in_cpu_memory(tensors.whole_N).view(torch.uint8).numpy())


def read(copy: Copied) -> dict[str, Tensor]:
    """The tensors of a copy that has arrived.

    >>> read(copied(joined({"a": torch.ones(2, dtype=torch.bfloat16)})))
    {'a': tensor([1., 1.], dtype=torch.bfloat16)}
    """
    return parted(copy.parts, torch.from_numpy(copy.whole_N).view(copy.dtype))
