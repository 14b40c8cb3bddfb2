"""Estimates from attempts at problems, with their uncertainty. Problems are the independent units; attempts at one
problem are not.

A value is `None` for a problem without one: none of its attempts was graded, or fewer than k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solera.errors import SoleraError

Z = 1.96
"""Standard normal quantile of 97.5 %. All intervals are 95 % intervals."""
ROUNDING = 1e-12
"""A standard deviation below this, relative to the largest value and at least to 1, comes from rounding."""


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


def wilson(share: float, problems: float) -> tuple[float, float]:
    """Wilson's score interval for the share p of n problems that passed:

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n).   It stays within [0, 1] and keeps a width at p = 0 and 1.

    >>> low, high = wilson(0.0, 10)
    >>> low, round(high, 4)
    (0.0, 0.2775)
    """
    centre, scale = share + Z * Z / (2 * problems), 1 + Z * Z / problems
    half = Z * math.sqrt(share * (1 - share) / problems + (Z / (2 * problems)) ** 2)
    low = 0.0 if share == 0 else (centre - half) / scale  # exactly 0; the formula would give a tiny number
    return low, 1.0 if share == 1 else (centre + half) / scale


def share_over_problems(value_P: Sequence[float]) -> MeanEstimate:
    """Mean m of values between 0 and 1, with Wilson's interval for n = P·m(1−m)/s² problems, and at least P.

    If each value is 0 or 1, n is P. Values in between vary less, so m is known as well as from more yes-or-no outcomes.
    Without any spread, n is P.

    >>> estimated = share_over_problems([1.0, 1.0, 0.5, 1.0])  # s² = 1/16, n = 4 · (7/64) / (1/16) = 7
    >>> (estimated.low, estimated.high) == wilson(0.875, 7)
    True
    """
    problems, (mean, variance) = len(value_P), _mean_and_variance(value_P)
    effective = max(problems, problems * mean * (1 - mean) / variance) if variance else problems
    low, high = wilson(mean, effective)
    return MeanEstimate(mean, low, high, problems)


def mean_over_problems(value_P: Sequence[float]) -> MeanEstimate:
    """m ± z·s/√P with s² = Σ(x − m)²/(P − 1), for values without limits. One problem has no interval. Nor do
    equal values, whose interval of width 0 would claim certainty about other problems.

    >>> mean_over_problems([0.5]).low is None, mean_over_problems([1.0, 1.0]).low is None
    (True, True)
    """
    problems, (mean, variance) = len(value_P), _mean_and_variance(value_P)
    if variance == 0:
        return MeanEstimate(mean, None, None, problems)
    half = Z * math.sqrt(variance / problems)
    return MeanEstimate(mean, mean - half, mean + half, problems)


def _mean_and_variance(value_P: Sequence[float]) -> tuple[float, float]:
    """m and s² = Σ(x − m)²/(P − 1), which is 0 for one problem and for values that are equal but for rounding."""
    mean = math.fsum(value_P) / len(value_P)
    variance = math.fsum((value - mean) ** 2 for value in value_P) / max(1, len(value_P) - 1)
    return mean, variance if math.sqrt(variance) > ROUNDING * max(1.0, *map(abs, value_P)) else 0.0


def estimate(value_P: Sequence[float | None], share: bool) -> MeanEstimate | None:
    """The mean over problems that have a value, with its interval. A `share` is a value between 0 and 1."""
    known_P = [value for value in value_P if value is not None]
    if not known_P:
        return None
    return share_over_problems(known_P) if share else mean_over_problems(known_P)


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
