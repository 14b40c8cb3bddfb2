"""How positions are divided among the programs of an attention kernel, and padded sizes of passes."""

from collections.abc import Callable

TILE = 64
"""Positions per program."""


def largest_size(size_of: Callable[[int], int], limit: int) -> int:
    """The largest size up to a limit, or 0. `size_of` gives the padded size of so many tokens."""
    size = 0
    while (larger := size_of(size + 1)) <= limit:
        size = larger
    return size
