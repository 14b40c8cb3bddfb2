"""Weights on their way into an engine that loads them in a thread."""

from collections.abc import Iterator
from concurrent import futures
from queue import SimpleQueue

import torch
from torch import Tensor

from solera.engines.faults import EngineError


class Arriving:
    """The tensors that `put` brings. Iterate once, in the thread that loads them."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[tuple[dict[str, Tensor], futures.Future[None]] | EngineError | None] = SimpleQueue()

    def put(self, tensors: dict[str, Tensor]) -> "futures.Future[None]":
        """Returns a future that ends when the tensors have been copied. Their owner may change them then."""
        copied = futures.Future[None]()
        self._messages.put((tensors, copied))
        return copied

    def end(self, error: EngineError | None = None) -> None:
        """Nothing more comes. With an `error`, something is missing, and loading fails with it."""
        self._messages.put(error)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (message := self._messages.get()) is not None:
            if isinstance(message, EngineError):
                raise message
            tensors, copied = message
            yield from tensors.items()
            for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # a copy inside a GPU has only begun
            del message, tensors
            copied.set_result(None)
