"""Estimates from attempts at problems, with their uncertainty. Problems are the independent units; attempts at one
problem are not.

A value is `None` for a problem without one: none of its attempts was graded, or fewer than k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from solera.errors import SoleraError

Z = 1.96
"""Standard normal quantile of 97.5 %. All intervals are 95 % intervals."""


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over problems with its 95 % interval; the limits are `None` if there is no spread to compute them from."""

    value: float
    low: float | None
    high: float | None
    problems: int


@dataclass(frozen=True)
class Difference:
    """Second minus first on the same problems, and the number of problems on which only one of them scores above 0."""

    estimate: MeanEstimate
    only_first: int
    only_second: int

    @property
    def excludes_zero(self) -> bool:
        low, high = self.estimate.low, self.estimate.high
        return low is not None and high is not None and not low <= 0 <= high


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n attempts, drawn without replacement, contain at least one of the c that passed.

    pass@k = 1 − C(n−c, k) / C(n, k)   (Chen et al., arXiv 2107.03374), unbiased for 1 − (1 − p)ᵏ. The binomials are
    exact integers, so nothing overflows or cancels.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (0 <= c <= n and k >= 1):
        raise SoleraError(f"pass@k of {c} passed attempts among {n} with k = {k}: it needs 0 ≤ passed ≤ n and k ≥ 1")
    if k > n:
        raise SoleraError(f"pass@{k} needs at least {k} attempts per problem; there are {n}")
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def wilson(passed: int, problems: int) -> MeanEstimate:
    """Share of problems that passed, each of them yes or no, with Wilson's score interval; p = passed/P:

    (p + z²/2P ± z·√(p(1−p)/P + z²/4P²)) / (1 + z²/P).   It stays within [0, 1] and keeps a width at p = 0 and 1.

    >>> wilson(0, 10).low, round(wilson(0, 10).high, 4)
    (0.0, 0.2775)
    """
    share, scale = passed / problems, 1 + Z * Z / problems
    centre = share + Z * Z / (2 * problems)
    half = Z * math.sqrt(share * (1 - share) / problems + (Z / (2 * problems)) ** 2)
    low = 0.0 if passed == 0 else (centre - half) / scale  # exactly 0; the formula would give a tiny number
    high = 1.0 if passed == problems else (centre + half) / scale
    return MeanEstimate(share, low, high, problems)


def mean_over_problems(value_P: Sequence[float]) -> MeanEstimate:
    """m ± z·s/√P with s² = Σ(x − m)²/(P − 1), for anything averaged within problems. One problem has no interval.

    >>> mean_over_problems([0.5]).low is None
    True
    """
    problems = len(value_P)
    mean = math.fsum(value_P) / problems
    if problems == 1:
        return MeanEstimate(mean, None, None, problems)
    variance = math.fsum((value - mean) ** 2 for value in value_P) / (problems - 1)
    half = Z * math.sqrt(variance / problems)
    return MeanEstimate(mean, mean - half, mean + half, problems)


def estimate(value_P: Sequence[float | None], share: bool) -> MeanEstimate | None:
    """The mean over problems that have a value, with its interval. A `share` is a value between 0 and 1. If it is 0
    or 1 for every problem, the interval is Wilson's. Otherwise it is the normal interval, cut off at 0 and 1 for a
    share.

    >>> estimate([1.0, 1.0, None, 0.5], share=True).high
    1.0
    """
    known_P = [value for value in value_P if value is not None]
    if not known_P:
        return None
    if share and all(value in (0.0, 1.0) for value in known_P):
        return wilson(round(sum(known_P)), len(known_P))
    found = mean_over_problems(known_P)
    if not share or found.low is None or found.high is None:
        return found
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))


def paired(first_P: Sequence[float | None], second_P: Sequence[float | None]) -> Difference | None:
    """Mean over problems of second − first, with the interval of these differences. The problems' difficulty cancels.

    >>> paired([0.0, 1.0, 0.0], [1.0, 1.0, None]).estimate.value
    0.5
    """
    pairs = [(a, b) for a, b in zip(first_P, second_P, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    return Difference(
        mean_over_problems([b - a for a, b in pairs]),
        only_first=sum(a > 0 >= b for a, b in pairs),
        only_second=sum(b > 0 >= a for a, b in pairs),
    )
