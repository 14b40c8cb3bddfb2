"""Reduce a curve to the few points that a page needs of a long run."""

import itertools
from collections.abc import Sequence
from statistics import fmean

Point = tuple[float, float]
MOST_POINTS = 1_000
"""Points per curve in a page: two per bucket of steps."""


def decimated(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """The first and the last point, and the lowest and the highest of every bucket, in the order of steps.

    No peak is lost: the extremes of the whole curve are extremes of their buckets.

    >>> decimated([(step, float(step == 7)) for step in range(20)], most=4)
    [(0, 0.0), (7, 1.0), (10, 0.0), (19, 0.0)]
    """
    if len(points) <= most:
        return list(points)
    kept = {points[0], points[-1]}
    for bucket in buckets(points, most // 2):
        kept |= {min(bucket, key=_value), max(bucket, key=_value)}
    return sorted(kept)


def means(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """The mean step and the mean value of every bucket, for a smoothed curve."""
    return [(fmean(step for step, _ in bucket), fmean(map(_value, bucket))) for bucket in buckets(points, most // 2)]


def buckets(points: Sequence[Point], count: int) -> list[Sequence[Point]]:
    """`count` runs of consecutive points, as equal in length as possible."""
    edges = [round(place * len(points) / count) for place in range(count + 1)]
    return [points[start:stop] for start, stop in itertools.pairwise(edges) if stop > start]


def _value(point: Point) -> float:
    return point[1]
