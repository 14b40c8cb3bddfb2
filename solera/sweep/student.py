"""Paired comparisons over seeds with Student's t distribution, and Holm's correction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solera.diagnosis.student import central_probability, two_sided_quantile


@dataclass(frozen=True)
class Paired:
    """Differences over common seeds: their mean, its 95 % interval, and the p-value of no difference. Interval and
    p-value are `None` if there is no spread."""

    mean: float
    low: float | None
    high: float | None
    p: float | None
    higher: int
    """Seeds on which the difference is above 0."""
    lower: int
    seeds: int


def paired(difference_S: Sequence[float]) -> Paired:
    """m ± t(S−1)·s/√S and the two-sided p of m = 0, with s² = Σ(d − m)²/(S − 1), over S seeds.

    If all differences are equal, there is no spread to judge by, so there is no interval and no p-value.
    """
    seeds = len(difference_S)
    mean = math.fsum(difference_S) / seeds
    higher, lower = sum(d > 0 for d in difference_S), sum(d < 0 for d in difference_S)
    deviation = spread(difference_S)
    if deviation is None or deviation < 1e-12:  # equal but for rounding
        return Paired(mean, None, None, None, higher, lower, seeds)
    error = deviation / math.sqrt(seeds)
    half = two_sided_quantile(seeds - 1) * error
    p = 1 - central_probability(abs(mean) / error, seeds - 1)
    return Paired(mean, mean - half, mean + half, p, higher, lower, seeds)


def spread(value_S: Sequence[float]) -> float | None:
    """Standard deviation over seeds, with S − 1; `None` for fewer than two."""
    if len(value_S) < 2:
        return None
    mean = math.fsum(value_S) / len(value_S)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in value_S) / (len(value_S) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of m is multiplied by m − k + 1, then made monotone, at most 1.

    >>> [round(p, 12) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted
