"""The other processes that train the same model. Whatever all of them must decide alike goes through here."""

from typing import Protocol, TypeVar

T = TypeVar("T")


class Peers(Protocol):
    """All ranks of a learner. Every rank must make the same calls in the same order."""

    count: int

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

    def most(self, number: int) -> int:
        return number

    def least(self, number: int) -> int:
        return number

    def gather(self, mine: list[T]) -> list[T]:
        return mine
