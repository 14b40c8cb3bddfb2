"""Summarise the files of verdict_coverage.py: how often intervals contain the true change, and verdicts are right.

python benchmarks/verdict_report.py coverage.jsonl [more.jsonl ...]

Prints Markdown tables. 95 % intervals come from a bootstrap over updates, because the probes of one update share its
true change. A run gives no verdict on a probe whose importance weights do not average 1; such probes are counted apart.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from solera.diagnosis.improvement import interval_of_mean
from solera.diagnosis.student import two_sided_quantile

NORMAL_95 = 1.96
SMALLEST = 1e-9
"""If every probe's standard error is below this, the update changed nothing: all groups were masked, or all tokens
clipped, or π and π_k have left what α writes."""
OURS = "one more prompt on each side"
"""The interval that runs use."""


class Judged(NamedTuple):
    """A probe, its update, and its intervals by name."""

    update: int
    truth: float
    sign: int
    """Of the true change; 0 if it is within 1.96 standard errors of 0."""
    trusted: bool
    """Whether the importance weights average 1."""
    interval: dict[str, tuple[float, float]]

    def inside(self, name: str) -> bool:
        low, high = self.interval[name]
        return low <= self.truth <= high

    def verdict(self) -> int:
        low, high = self.interval[OURS]
        return (int(low > 0) - int(high < 0)) * self.trusted


def intervals(gains_P: np.ndarray) -> dict[str, tuple[float, float]]:
    """Several 95 % intervals for the mean over a probe's prompts.

    The last one adds two prompts that the probe may have missed to both ends: one as good as the most extreme of it,
    one as bad.
    """
    count, mean = len(gains_P), float(gains_P.mean())
    error = float(gains_P.std(ddof=1)) / math.sqrt(count)
    further = math.sqrt(error**2 + 2 * float(np.abs(gains_P).max()) ** 2 / count / (count - 1))
    student, ours = two_sided_quantile(count - 1), interval_of_mean(torch.from_numpy(gains_P))
    assert ours is not None
    widths = {"normal": NORMAL_95 * error, "Student's t": student * error, "two more prompts": student * further}
    return {OURS: ours} | {name: (mean - width, mean + width) for name, width in widths.items()}


def judged(number: int, update: dict[str, Any]) -> list[Judged]:
    truth, error = update["truth"], update["truth_error"]
    sign = 0 if abs(truth) < NORMAL_95 * error else int(math.copysign(1, truth))
    return [
        Judged(number, truth, sign, probe["covered"], intervals(np.array(gains_P)))
        for probe, gains_P in zip(update["probes"], update["gains"], strict=True)
    ]


def share(probes: list[Judged], values: list[bool]) -> str:
    """The share of true values in percent, with its 95 % interval from 10,000 samples of updates with replacement."""
    if not probes:
        return "–"
    _, place = np.unique([probe.update for probe in probes], return_inverse=True)
    counts = np.bincount(place)
    hits = np.bincount(place, values)
    drawn = np.random.default_rng(0).integers(len(counts), size=(10_000, len(counts)))
    low, high = np.quantile(hits[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return f"{100 * np.mean(values):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def table(*head: str) -> str:
    return f"\n| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}"


def report(updates: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of the report. A probe's verdict is right if the true change has its sign."""
    moved = [update for update in updates if any(probe["error"] > SMALLEST for probe in update["probes"])]
    probes = [probe for number, update in enumerate(moved) for probe in judged(number, update)]
    trusted = [probe for probe in probes if probe.trusted]
    yield f"{len(moved)} updates ({len(updates) - len(moved)} others changed nothing), {len(probes)} probes"
    yield f"importance weights average 1 on {len(trusted)} of them; on the others, a run gives no verdict"
    yield from precision(moved)
    yield table("interval", "contains the truth, all probes", "weights average 1", "truth below it", "above it")
    for name in probes[0].interval:
        below = 100 * np.mean([probe.truth < probe.interval[name][0] for probe in trusted])
        above = 100 * np.mean([probe.truth > probe.interval[name][1] for probe in trusted])
        both = (share(some, [probe.inside(name) for probe in some]) for some in (probes, trusted))
        yield f"| {name} | {' | '.join(both)} | {below:.1f} % | {above:.1f} % |"
    yield table("updates", "number", f"interval ({OURS}) contains the truth", "certified", "harmful")
    for name, chosen in parts(moved).items():
        some = [probe for probe in trusted if probe.update in chosen]
        said = [probe.verdict() for probe in probes if probe.update in chosen]
        verdicts = " | ".join(f"{100 * said.count(verdict) / len(said):.1f} %" for verdict in (1, -1))
        yield f"| {name} | {len(chosen)} | {share(some, [probe.inside(OURS) for probe in some])} | {verdicts} |"
    yield table("verdict", "probes", "right", "wrong", "too small to tell", "right, if not too small")
    for word, verdict in (("certified", 1), ("harmful", -1)):
        of_it = [probe for probe in probes if probe.verdict() == verdict]
        signs = [probe.sign * verdict for probe in of_it]
        told = [probe for probe in of_it if probe.sign]
        counts = f"{len(signs)} | {signs.count(1)} | {signs.count(-1)} | {signs.count(0)}"
        yield f"| {word} | {counts} | {share(told, [probe.sign == verdict for probe in told])} |"


def precision(updates: list[dict[str, Any]]) -> Iterator[str]:
    half = [np.median([NORMAL_95 * probe["error"] for probe in update["probes"]]) for update in updates]
    ratio = np.array([update["truth_error"] / each for update, each in zip(updates, half, strict=True)])
    ideal = np.mean([math.erf(NORMAL_95 / math.sqrt(2 * (1 + (NORMAL_95 * each) ** 2))) for each in ratio])
    yield f"standard error of the truth / half-width: median {np.median(ratio):.3f}, largest {ratio.max():.3f}"
    yield f"because of this error, an exact interval would contain the measured truth in {100 * ideal:.1f} %"


def parts(updates: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Numbers of the updates: all, by age, by learning rate."""
    found: dict[str, set[int]] = {"all": set(range(len(updates)))}
    for low, high in ((0, 0), (1, 4), (5, 10), (11, 19)):
        found[f"age {low} to {high}"] = {n for n, update in enumerate(updates) if low <= update["age"] <= high}
    for rate in sorted({update["lr"] for update in updates}):
        found[f"lr {rate:g}"] = {n for n, update in enumerate(updates) if update["lr"] == rate}
    return {name: numbers for name, numbers in found.items() if numbers}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="files of verdict_coverage.py")
    given = parser.parse_args()
    found = [json.loads(line) for file in given.files for line in file.read_text().splitlines()]
    print(*report(found), sep="\n")
