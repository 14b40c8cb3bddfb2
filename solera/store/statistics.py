"""Count the rollouts of a store by origin, age, reward and uses."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from sqlalchemy import func, select

from solera.records import age_band
from solera.store.catalogue import Catalogue
from solera.store.database import Place, open_for_reading
from solera.store.drawing import NO_AGE, Mask, Rows
from solera.store.schema import rollouts, uses

_r, _u = rollouts.c, uses.c
_LINEAGE = select(_r.lineage).where(_r.lineage.is_not(None), _r.origin == "self").order_by(_r.id.desc()).limit(1)
_LAST = select(func.max(_u.version))
_WRITTEN = select(func.max(_r.version))
BANDS = 8
"""Maximum number of bars in the plot of rewards."""


class RolloutCounts(NamedTuple):
    """Counts of one kind of rollouts. `reward` is the mean of those that have one."""

    name: str
    rollouts: int
    prompts: int
    waiting: int
    reward: float | None
    used: int
    uses: int


Statistics = dict[str, list[RolloutCounts]]


def statistics(place: Place) -> Statistics:
    """Counts for each origin, age, reward and number of uses. Ages are relative to the latest version."""
    with open_for_reading(place) as connection:
        catalogue = Catalogue(connection.scalar(_LINEAGE) or "")
        catalogue.refresh(connection)
        last = connection.scalar(_LAST)
        now = (connection.scalar(_WRITTEN) or 0) if last is None else last + 1
    rows = catalogue.rows
    return {
        "origin": [_line(rows, name, rows.origin_R == code) for code, name in enumerate(catalogue.origins)],
        "age": [_line(rows, name, where_R) for name, where_R in _ages(rows, now) if where_R.any()],
        "reward": [_line(rows, name, where_R) for name, where_R in _rewards(rows) if where_R.any()],
        "uses": [_line(rows, name, where_R) for name, where_R in _uses(rows) if where_R.any()],
    }


def _line(rows: Rows, name: str, where_R: Mask) -> RolloutCounts:
    reward_R, uses_R = rows.reward_R[where_R], rows.uses_R[where_R]
    known_R = reward_R[~np.isnan(reward_R)]
    mean = float(known_R.mean(dtype=np.float64)) if len(known_R) else None
    prompts = len(np.unique(rows.key_R[where_R]))
    waiting = len(reward_R) - len(known_R)
    return RolloutCounts(name, len(reward_R), prompts, waiting, mean, int((uses_R > 0).sum()), int(uses_R.sum()))


def _ages(rows: Rows, now: int) -> Iterator[tuple[str, Mask]]:
    aged_R = rows.version_R != NO_AGE
    age_R = np.where(aged_R, now - rows.version_R, 0)
    bands = defaultdict[str, list[int]](list)
    for age in np.unique(age_R[aged_R]).tolist():
        bands[age_band(age)].append(age)
    yield from ((name, aged_R & np.isin(age_R, ages)) for name, ages in bands.items())
    yield "none", ~aged_R


def _rewards(rows: Rows) -> Iterator[tuple[str, Mask]]:
    """One bar per value if there are few values, otherwise bands of equal width."""
    known_R = rows.reward_R[~np.isnan(rows.reward_R)]
    values = np.unique(known_R)
    if len(values) <= BANDS:
        yield from ((f"{value:g}", rows.reward_R == value) for value in values)
    else:
        edges = np.linspace(values[0], values[-1], BANDS + 1)
        place_R = np.clip(np.searchsorted(edges, rows.reward_R, side="right") - 1, 0, BANDS - 1)
        known = ~np.isnan(rows.reward_R)
        yield from ((f"{edges[b]:.3g} to {edges[b + 1]:.3g}", known & (place_R == b)) for b in range(BANDS))
    yield "none yet", np.isnan(rows.reward_R)


def _uses(rows: Rows) -> Iterator[tuple[str, Mask]]:
    for first, last in ((0, 0), (1, 1), (2, 3), (4, 7), (8, np.iinfo(np.int32).max)):
        name = str(first) if first == last else f"{first} to {last}" if first < 8 else "8 or more"
        yield name, (rows.uses_R >= first) & (rows.uses_R <= last)
