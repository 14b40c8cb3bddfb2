"""Which responses enter the oracle's loss, with which advantage: docs/formulas.md, section 1, and RED-Drop (3)."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Response:
    reward: float | None  # None: missing
    mask: list[bool]  # which tokens the policy answers for
    logp: Tensor  # [T] float64
    behaviour: list[float] | None  # None: unknown
    proximal: list[float]
    ref: list[float]
    entropy: Tensor  # [T] float64
    uniform: float  # for RED-Drop

    @property
    def tokens(self) -> list[int]:
        return [t for t, answers in enumerate(self.mask) if answers]

    @property
    def n(self) -> int:
        return len(self.tokens)


@dataclass
class Member:
    """A response that takes part, with its advantage."""

    response: Response
    advantage: float


def present(group: list[Response]) -> list[Response]:
    """The responses with a reward and at least one token."""
    kept = []
    for response in group:
        if response.reward is None or response.n == 0:
            continue
        if not math.isfinite(response.reward):
            raise ValueError("a reward is NaN or infinite")
        kept.append(response)
    return kept


def red_drop(group: list[Response], which: str) -> tuple[list[Response], list[Response]]:
    """Survivors and dropped."""
    mean = sum(response.reward for response in group) / len(group)
    positives = [response for response in group if response.reward >= mean]
    negatives = [response for response in group if response.reward < mean]
    if which == "random":
        negatives.sort(key=lambda response: response.uniform)
    else:
        negatives.sort(key=lambda response: (response.reward, response.uniform))
    too_many = max(0, len(negatives) - len(positives))
    dropped = negatives[:too_many]
    survivors = [response for response in group if not any(response is other for other in dropped)]
    return survivors, dropped


def advantages(rewards: list[float], options: dict[str, Any]) -> list[float]:  # noqa: PLR0911
    kind = options["advantage"]
    G = len(rewards)
    mean = sum(rewards) / G
    var = sum((r - mean) ** 2 for r in rewards) / G
    if kind == "raw":
        return list(rewards)
    if kind == "shifted":
        return [r - (mean + options["delta"]) for r in rewards]
    if kind == "–" or G == 1:
        return [0.0 for _ in rewards]
    if kind == "mean":
        return [r - mean for r in rewards]
    if kind == "whiten":
        return [(r - mean) / math.sqrt(var + options["whiten_epsilon"]) for r in rewards]
    if kind == "whiten_bessel":
        return [(r - mean) / (math.sqrt(var * G / (G - 1)) + 1e-4) for r in rewards]
    if kind == "leave_one_out":
        return [G / (G - 1) * (r - mean) for r in rewards]
    if kind == "logavgexp":
        tau = options["advantage_tau"]
        return [r - log_mean_exp(rewards, tau) for r in rewards]
    raise ValueError(kind)


def log_mean_exp(rewards: list[float], tau: float) -> float:
    """τ·(logsumexp(r/τ) − log G) = τ·log Ẑ."""
    top = max(rewards)
    return top + tau * math.log(sum(math.exp((r - top) / tau) for r in rewards) / len(rewards))


def taking_part(groups: list[list[Response]], options: dict[str, Any]) -> list[list[Member]]:
    """The groups with something left, each with the responses that take part."""
    result = []
    for group in groups:
        everyone = present(group)
        if not everyone:
            continue
        if options["zero_variance_mask"] and all(r.reward == everyone[0].reward for r in everyone):
            continue
        survivors, dropped = everyone, []
        if options["drop"] != "none":
            survivors, dropped = red_drop(everyone, options["drop"])
        A = advantages([response.reward for response in survivors], options) if survivors else []
        members = [Member(response, a) for response, a in zip(survivors, A, strict=True)]
        if options["keep_denominator"]:
            members += [Member(response, 0.0) for response in dropped]
        if options["term"] == "sft":
            members = [member for member in members if member.response.reward >= options["threshold"]]
        if members:
            result.append(members)
    return result
