"""Remembers which engine has read which texts, because an engine computes a prefix that it knows only once."""

from collections import OrderedDict
from collections.abc import Iterator

BLOCK = 16
"""Tokens after which a prefix is remembered. The whole text is remembered as well."""
REMEMBERED = 100_000
"""Prefixes that are remembered. The oldest are forgotten first."""


class Prefixes:
    """The prefixes that each of several engines has read.

    >>> known = Prefixes()
    >>> known.add((5, 6, 7), 1)
    >>> known.shared((5, 6, 7)), known.shared((5, 6, 8))
    ({1: 3}, {})
    """

    def __init__(self) -> None:
        self._readers = OrderedDict[int, set[int]]()
        """The engines that have read a prefix, by its hash."""

    def add(self, token_ids: tuple[int, ...], engine: int) -> None:
        for _, key in _keys(token_ids):
            self._readers.setdefault(key, set()).add(engine)
            self._readers.move_to_end(key)
        while len(self._readers) > REMEMBERED:
            self._readers.popitem(last=False)

    def shared(self, token_ids: tuple[int, ...]) -> dict[int, int]:
        """How many tokens of this text each engine has read before, as far as is remembered."""
        found = dict[int, int]()
        for length, key in _keys(token_ids):
            for engine in self._readers.get(key, ()):
                found[engine] = length
        return found

    def forget(self, engine: int) -> None:
        """The engine has started again."""
        for readers in self._readers.values():
            readers.discard(engine)


def _keys(token_ids: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Length and hash of the text's prefixes, the shortest first."""
    key = 0
    for start in range(0, len(token_ids), BLOCK):
        block = token_ids[start : start + BLOCK]
        key = hash((key, block))
        yield start + len(block), key
