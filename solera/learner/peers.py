"""The other processes that train the same model. Whatever all of them must decide alike goes through here."""

from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Peers(Protocol):
    """All ranks of a learner. Every rank must make the same calls in the same order."""

    count: int
    group: Any
    """Their process group; `None` for a learner in one process."""

    def most(self, number: int) -> int:
        """The largest number that a rank gave."""
        ...

    def least(self, number: int) -> int:
        """The smallest number that a rank gave."""
        ...

    def gather(self, mine: list[T]) -> list[T]:
        """The lists of all ranks, joined in the order of the ranks."""
        ...


class Alone:
    """A learner in one process."""

    count = 1
    group = None

    def most(self, number: int) -> int:
        return number

    def least(self, number: int) -> int:
        return number

    def gather(self, mine: list[T]) -> list[T]:
        return mine
