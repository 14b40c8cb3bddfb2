"""Paired comparisons over seeds: Student's t distribution for whole degrees of freedom, and Holm's correction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


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


def central_probability(t: float, freedom: int) -> float:
    """P(|T| < t) for Student's T with ν degrees of freedom, a finite sum (Abramowitz & Stegun 26.7.3 and 26.7.4).

    θ = atan(t/√ν), c = cos θ;   ν odd: (2/π)·(θ + sin θ·(c + 2/3·c³ + (2·4)/(3·5)·c⁵ + … up to c^(ν−2)))
                                 ν even: sin θ·(1 + 1/2·c² + (1·3)/(2·4)·c⁴ + … up to c^(ν−2))

    >>> round(central_probability(1.0, 1), 12)
    0.5
    """
    theta = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(theta) ** 2
    return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total


def two_sided_quantile(freedom: int, probability: float = 0.95) -> float:
    """The t with P(|T| < t) = probability, by bisection.

    >>> round(two_sided_quantile(4), 3)
    2.776
    """
    low, high = 0.0, 1.0
    while central_probability(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if central_probability(middle, freedom) < probability else (low, middle)
    return high


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
