"""Which tensors travel together. One call for each small tensor would take longer than the tensors."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
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
