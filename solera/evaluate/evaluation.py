"""The result of an evaluation: the attempts of every model at the same problems, and the numbers computed from them."""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from solera.config import Config
from solera.errors import SoleraError, counted
from solera.evaluate.attempts import Attempts, Values
from solera.evaluate.candidates import Candidate
from solera.evaluate.statistics import Difference, MeanEstimate, estimate, paired

GREEDY = "pass@1 greedy"
SECTIONS = ("task", "reward", "sampling", "evaluate")
"""Config sections that determine what is measured."""


@dataclass(frozen=True)
class Examined:
    """One model's attempts: a greedy one at each problem and, if requested, sampled ones."""

    candidate: Candidate
    greedy: Attempts
    sampled: Attempts | None
    k: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.candidate.name

    def keys(self) -> list[str]:
        """The problems, in order."""
        return [problem.key for problem in self.greedy.problems]

    def tasks(self) -> "dict[str, Examined]":
        """The same for the problems of each task alone."""
        sampled = self.sampled.tasks() if self.sampled is not None else {}
        return {
            name: dataclasses.replace(self, greedy=part, sampled=sampled.get(name))
            for name, part in self.greedy.tasks().items()
        }

    def quantities(self) -> dict[str, Values]:
        """The value of each quantity for each problem. Estimates and comparisons are means over these."""
        values = {GREEDY: self.greedy.rate_P(), "reward greedy": self.greedy.reward_P()}
        if self.sampled is not None:
            values[f"avg@{self.sampled.samples}"] = self.sampled.rate_P()
            values |= {f"pass@{k}": self.sampled.pass_at_P(k) for k in self.k}
            values["reward sampled"] = self.sampled.reward_P()
        return values

    def estimates(self) -> dict[str, MeanEstimate | None]:
        """Each quantity's mean over problems with its interval. Only rewards can be outside 0 to 1."""
        rewards = {"reward greedy", "reward sampled"}
        return {name: estimate(value_P, name not in rewards) for name, value_P in self.quantities().items()}


@dataclass(frozen=True)
class Extremes:
    """A quantity over the checkpoints of a run: the maximum, the checkpoint that has it, and the mean."""

    max: float
    at: str
    mean: float


@dataclass(frozen=True)
class Evaluation:
    """Every model's attempts, and the settings used."""

    config: Config
    models: tuple[Examined, ...]

    def comparisons(self) -> Iterator[tuple[Examined, dict[str, Difference | None]]]:
        """Each further model with its paired differences from the first, by quantity, on the problems that both
        attempted."""
        first, keys = self.models[0].quantities(), self.models[0].keys()
        for model in self.models[1:]:
            place = {key: index for index, key in enumerate(model.keys())}
            second = {
                name: [value_P[place[key]] if key in place else None for key in keys]
                for name, value_P in model.quantities().items()
            }
            yield model, {name: paired(first[name], second[name]) for name in first}

    def over_checkpoints(self) -> dict[str, dict[str, Extremes]]:
        """For each run given with its checkpoints: maximum and mean of each quantity over them."""
        runs = dict.fromkeys(model.candidate.run for model in self.models if model.candidate.run is not None)
        return {run: extremes([m for m in self.models if m.candidate.run == run]) for run in runs}

    def as_json(self) -> dict[str, Any]:
        """Plain data: settings, estimates, counts per problem, comparisons."""
        return {
            "settings": {
                **{section: dataclasses.asdict(getattr(self.config, section)) for section in SECTIONS},
                "seed": self.config.run.seed,
                "k": self.models[0].k,
            },
            "models": [_plain(model) for model in self.models],
            "checkpoints": {
                run: {name: dataclasses.asdict(found) for name, found in quantities.items()}
                for run, quantities in self.over_checkpoints().items()
            },
            "comparisons": [
                {
                    "first": self.models[0].name,
                    "second": model.name,
                    "differences": {name: _plain_difference(found) for name, found in differences.items()},
                }
                for model, differences in self.comparisons()
            ],
        }


def check_k(k: tuple[int, ...], config: Config) -> None:
    """Refuse a k that cannot be computed from the sampled attempts."""
    samples = config.evaluate.samples
    for value in k:
        if value < 1:
            raise SoleraError(f"pass@{value}: k must be at least 1")
        if value > samples:
            raise SoleraError(
                f"pass@{value} cannot be computed from {counted(samples, 'attempt')} per problem: raise "
                "--samples (evaluate.samples)"
            )
    if k and config.evaluate.temperature == 0:
        raise SoleraError("pass@k needs sampled attempts: set --temperature (evaluate.temperature) above 0")


def extremes(models: list[Examined]) -> dict[str, Extremes]:
    """Maximum and mean of each quantity over models. Models without a value are skipped."""
    estimates = [(model.name, model.estimates()) for model in models]
    result = {}
    for quantity in models[0].quantities():
        found = [(estimate.value, name) for name, of in estimates if (estimate := of[quantity]) is not None]
        if found:
            best, name = max(found, key=lambda pair: pair[0])
            result[quantity] = Extremes(best, name, statistics.fmean(value for value, _ in found))
    return result


def _plain(model: Examined) -> dict[str, Any]:
    return {
        "model": model.name,
        "estimates": {name: e and dataclasses.asdict(e) for name, e in model.estimates().items()},
        "tasks": {
            task: {name: e and dataclasses.asdict(e) for name, e in part.estimates().items()}
            for task, part in model.tasks().items()
        },
        "greedy": _plain_attempts(model.greedy),
        "sampled": _plain_attempts(model.sampled) if model.sampled is not None else None,
    }


def _plain_attempts(attempts: Attempts) -> dict[str, Any]:
    return {**dataclasses.asdict(attempts), "ungraded": attempts.ungraded}


def _plain_difference(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    counts = {"only_first": difference.only_first, "only_second": difference.only_second}
    return {**dataclasses.asdict(difference.estimate), **counts, "excludes_zero": difference.excludes_zero}
