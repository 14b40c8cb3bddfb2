"""Detect text that offers several numbers, or one in several units; such text gives no single number."""

import re

from solera.tasks import wording
from solera.tasks.terms import Quantity

MOST_NUMBERS = 30


def several(said: str, found: list[Quantity]) -> bool:
    """Whether a statement offers several numbers, or one in several units."""
    one = found[0]
    other = next((item for item in found[1:MOST_NUMBERS] if item.value != one.value), None)
    if other is None:
        return len(found) > MOST_NUMBERS
    gap = said[found[found.index(other) - 1].end : other.start]
    if wording.OR.fullmatch(gap):
        units = [wording.UNIT.match(said, place) for place in (one.end, other.end)]
        return not (units[0] and units[1] and units[0][1].lower() not in ("or", units[1][1].lower()))
    return _listed(said, gap, other) or bool(wording.COMPOUND.fullmatch(gap) or wording.AND.fullmatch(gap))


def _listed(said: str, gap: str, other: Quantity) -> bool:
    """`72, 74` and `72 74`, but not `2 $5 bills` and `56 6-inch pencils`."""
    if not gap.strip():
        return said[other.start] not in "$€£" and not re.match("[ -][A-Za-z]", said[other.end : other.end + 2])
    return wording.LIST.fullmatch(gap) is not None


def restated(said: str, one: Quantity, other: Quantity) -> bool:
    """`$18 a day, or $126 a week`: the same in another unit."""
    units = [wording.UNIT_AFTER.match(said, item.end) for item in (one, other)]
    gap = said[one.end : other.start]
    return bool(wording.OR.fullmatch(gap) and units[0] and units[1] and units[0][1].lower() != units[1][1].lower())


def in_one_unit(said: str, found: list[Quantity]) -> bool:
    """Whether the last number restates the two before it: `2 hours and 30 minutes, or 150 minutes`."""
    if len(found) < 3 or not wording.OR.fullmatch(said[found[-2].end : found[-1].start]):
        return False
    return wording.COMPOUND.fullmatch(said[found[-3].end : found[-2].start]) is not None


def offered(said: str, one: Quantity, other: Quantity) -> bool:
    gap = said[one.end : other.start]
    if one.value == other.value:
        return False
    return _listed(said, gap, other) or bool(
        wording.OR.fullmatch(gap)
        or wording.COMPOUND.fullmatch(gap)
        or (wording.BETWEEN.search(said, 0, one.start) and "and" in gap)
    )
