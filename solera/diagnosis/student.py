"""Student's t distribution: probabilities and quantiles, without a library."""

import math
from functools import lru_cache


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


@lru_cache
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
