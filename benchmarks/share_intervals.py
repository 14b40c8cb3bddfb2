#!/usr/bin/env python3
"""How often do 95 % intervals of avg@n and pass@n contain the truth? Simulated evaluations, printed as a table.

    python benchmarks/share_intervals.py [--evaluations 4000] [--problems 100 500 1319]

A problem's chance to be solved in an attempt is one of two numbers, or drawn from a beta distribution. `normal` is
m ± z·s/√P. `one more` counts one more problem with the value 1 at its upper end, and one with 0 at its lower end.
`solera` is the interval of `solera eval`. Widths are means, in points.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from solera.evaluate.statistics import Z, share_over_problems

Values = npt.NDArray[np.float64]
Limits = tuple[Values, Values]


class Kind(NamedTuple):
    """How the chances of problems are distributed."""

    name: str
    quantity: str
    draw: Callable[[np.random.Generator, tuple[int, int]], Values]
    truth: float


def mixed(quantity: str, share: float, chance: float, otherwise: float = 0.0) -> Kind:
    """Some problems have a chance, all others another one."""
    tries = int(quantity.partition("@")[2]) if quantity.startswith("pass") else 1
    truth = sum(weight * (1 - (1 - p) ** tries) for weight, p in ((share, chance), (1 - share, otherwise)))
    name = f"{share:.0%} have {chance:g}, others {otherwise:g}" if share < 1 else f"all have {chance:g}"
    return Kind(name, quantity, lambda rng, shape: np.where(rng.random(shape) < share, chance, otherwise), truth)


def beta(quantity: str, a: float, b: float) -> Kind:
    return Kind(f"Beta({a:g}, {b:g})", quantity, lambda rng, shape: rng.beta(a, b, shape), a / (a + b))


KINDS = (
    mixed("avg@4", 0.01, 0.5, 1), mixed("avg@4", 0.05, 0.5, 1), mixed("avg@4", 0.3, 0.3, 1), mixed("avg@4", 0.1, 0.3),
    mixed("avg@4", 1, 0.03), beta("avg@4", 0.05, 2), beta("avg@4", 0.1, 1.5), beta("avg@4", 0.3, 0.3),
    mixed("avg@16", 0.01, 0.5, 1), mixed("avg@16", 0.05, 0.5, 1), mixed("pass@16", 0.05, 0.05, 1),
    mixed("pass@16", 0.3, 0.3, 1),
)  # fmt: skip


def normal(value_EP: Values) -> Limits:
    mean_E, half_E = value_EP.mean(1), Z * value_EP.std(1, ddof=1) / math.sqrt(value_EP.shape[1])
    return mean_E - half_E, mean_E + half_E


def one_more(value_EP: Values) -> Limits:
    with_0, with_1 = (np.pad(value_EP, ((0, 0), (0, 1)), constant_values=value) for value in (0, 1))
    return normal(with_0)[0].clip(0), normal(with_1)[1].clip(None, 1)


def solera(value_EP: Values) -> Limits:
    found = [share_over_problems(value_P) for value_P in value_EP.tolist()]
    return np.array([each.low for each in found]), np.array([each.high for each in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=4000)
    parser.add_argument("--problems", type=int, nargs="+", default=[100, 500, 1319])
    given, rng = parser.parse_args(), np.random.default_rng(0)
    print("| problems | quantity | chances | truth | normal | one more | solera | widths |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | --- |")
    for problems, kind in itertools.product(given.problems, KINDS):
        attempts = int(kind.quantity.partition("@")[2])
        passed_EP = rng.binomial(attempts, kind.draw(rng, (given.evaluations, problems)))
        value_EP = (passed_EP > 0).astype(float) if kind.quantity.startswith("pass") else passed_EP / attempts
        found = [interval(value_EP) for interval in (normal, one_more, solera)]
        inside = [f"{((low_E <= kind.truth) & (kind.truth <= high_E)).mean():.1%}" for low_E, high_E in found]
        widths = [f"{100 * (high_E - low_E).mean():.2f}" for low_E, high_E in found]
        print(
            f"| {problems} | {kind.quantity} | {kind.name} | {kind.truth:.1%} | {' | '.join(inside)} | "
            f"{', '.join(widths)} |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
