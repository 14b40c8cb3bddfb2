"""Which chart shows which metric. A metric that no panel names gets its own panel, so that none is lost."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from solera.diagnosis.verdict import STATE_WORDS


@dataclass(frozen=True)
class Panel:
    """A chart: its title, its metrics with their labels, and how they are drawn."""

    title: str
    metrics: dict[str, str]
    explains: str = ""
    stepped: bool = False
    """Values hold until the next one. They are not smoothed."""
    syncs: bool = False
    """Mark the steps at which the engine received weights."""
    read_out: dict[str, str] = field(default_factory=dict)
    """Metrics that are shown at the pointer but not drawn."""
    words: dict[str, dict[int, str]] = field(default_factory=dict)
    """Metrics whose values are shown as words."""
    apart: bool = False
    """Draw separate points without a line."""
    intervals: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics with an interval, and the metrics that are its ends. Drawn as a band, or as bars on points."""
    right: tuple[str, ...] = ()
    """Metrics with their own axis, on the right."""
    axes: tuple[str, str] = ("", "")
    """Names of the left and the right axis, if there are both."""
    percent: tuple[str, ...] = ()
    """Metrics that are shares, shown in percent."""
    pictured: bool = False
    """Also drawn in `plot.png`."""
    floor: float = 0
    """The axis reaches at least up to this value. Smaller values are rounding errors."""

    @property
    def shown(self) -> set[str]:
        """Every metric that the panel uses."""
        ends = (end for pair in self.intervals.values() for end in pair)
        return {*self.metrics, *self.read_out, *ends}


PANELS = (
    Panel(
        "Does it learn?",
        {"eval/pass@1": "held-out accuracy", "reward/mean": "reward of the batch"},
        "Left axis: accuracy of the learner's weights on problems it never trains on. Right axis: mean reward of the "
        "responses in the batch, with the weights of its parts.",
        right=("reward/mean",),
        axes=("accuracy", "reward"),
        percent=("eval/pass@1",),
        pictured=True,
    ),
    Panel(
        "How old is the data it learns from?",
        {"age/mean": "mean age", "age/max": "oldest response"},
        "Training batches since a response was generated. If several versions wrote it: the mean over its tokens, and "
        "its oldest token. Marks below the axis are weight syncs.",
        stepped=True,
        syncs=True,
        read_out={"sync/version": "engine holds version", "age/mixed": "share of responses by several versions"},
        pictured=True,
    ),
    Panel(
        "How far is the policy from the data's policies?",
        {"divergence/tv_sequence": "TV of responses", "divergence/tv_token": "TV of tokens"},
        "Total variation between the policy before the batch and the policies that wrote it: 0 is "
        "on-policy, 1 means nothing in common.",
        pictured=True,
        floor=0.01,
    ),
    Panel(
        "KL(author‖policy)",
        {"divergence/kl": "KL"},
        "In nats per response, estimated from the tokens of the batch. Never below 0.",
    ),
    Panel(
        "How much of the batch would count?",
        {"divergence/ess": "effective sample size"},
        "Share of the responses that an importance-weighted mean would effectively use.",
    ),
    Panel(
        "Why is the policy not its data's author?",
        {
            "divergence/by_cause/lag": "older weights",
            "divergence/by_cause/engine": "the engine's arithmetic",
            "divergence/by_cause/truncation": "truncated sampling",
        },
        "KL(author‖policy) in nats per token of the run's own text, divided by cause.",
        read_out={"divergence/by_cause/unidentified": "share of tokens whose cause is not known"},
    ),
    Panel(
        "Engine error",
        {"mismatch/logp": "mean difference of log-probabilities"},
        "Difference between engine and learner on tokens that the same weights generated. It comes from rounding, "
        "not from the age of the data.",
    ),
    Panel(
        "Did the update help?",
        {"improvement/estimate": "improvement"},
        "Change of the expected reward by one update, with its 95 % interval, estimated on held-out prompts. An update "
        "is certified if the whole interval is above 0, harmful if it is below 0, and otherwise inconclusive.",
        apart=True,
        intervals={"improvement/estimate": ("improvement/low", "improvement/high")},
        read_out={
            "improvement/low": "from",
            "improvement/high": "to",
            "improvement/state": "verdict",
            "improvement/tight": "tight bound",
            "improvement/theorem1": "Theorem 1",
            "improvement/mean_w": "mean weight (1 is covered)",
        },
        words={"improvement/state": STATE_WORDS},
    ),
    Panel(
        "How far did the update leave the policy from the engine's?",
        {"probe/tv_sequence": "TV of responses", "probe/tv_token": "TV of tokens"},
        "Total variation between the learner's and the engine's policy after a judged update, measured on the probe: "
        "held-out responses that are never trained on.",
        apart=True,
        read_out={"probe/kl": "KL", "probe/chi2": "χ²", "probe/ess": "effective sample size"},
    ),
    Panel(
        "What is not learned from?",
        {"clip/fraction": "tokens clipped", "reward/zero_variance_fraction": "groups with equal rewards"},
        "Tokens whose gradient the clip removed; groups in which no response was better than another.",
        pictured=True,
    ),
    Panel(
        "Where do the tokens go?",
        {
            "tokens/generated": "generated",
            "tokens/graded": "drawn and graded",
            "tokens/trained": "trained on",
            "tokens/effective": "effective",
        },
        "Tokens of a step. Effective tokens are those trained on, multiplied by their effective sample size.",
        read_out={
            "waste/zero_variance": "lost: group with equal rewards",
            "waste/dropped": "lost: dropped",
            "waste/truncated": "lost: cut off and masked",
            "waste/ungraded": "lost: without a grade",
            "waste/left_out": "lost: below the objective's threshold",
            "waste/stale": "lost: too far from the policy that wrote them",
            "tokens/probe": "written for a probe",
        },
    ),
    Panel(
        "Loss",
        {"learn/loss": "loss"},
        "The loss, including penalties. It can stay level while the policy improves.",
    ),
    Panel(
        "Entropy of the policy",
        {"policy/entropy": "entropy"},
        "Nats per token. Near 0 the policy explores nothing new.",
    ),
    Panel("Gradient norm", {"learn/grad_norm": "before clipping"}, "Mean over the step's optimiser steps."),
    Panel("Learning rate", {"learn/lr": "learning rate"}, stepped=True),
    Panel("Length of a response", {"response/length": "tokens"}, "Mean, including the end token."),
    Panel("Responses cut off", {"response/truncated": "share"}, "Share cut off at the token limit."),
)

FAMILIES = {
    "eval/pass@1/": ("Accuracy by part of the mixture", "Held-out accuracy on the problems of each part."),
    "origin_tokens/": ("Where does the data come from?", "Share of the tokens in the loss, by origin."),
    "origin_weight/": ("Whose text moves the policy?", "Share of the gradient: the sum of |∂loss/∂log π| over tokens."),
    "origin_clipped/": ("Whose tokens are clipped?", "Share of the tokens whose gradient the clip removed."),
    "age_tokens/": ("How old are the tokens in the loss?", "Share of the tokens in the loss, by age in batches."),
    "age_weight/": ("How old are the tokens that move the policy?", "Share of the gradient, by age."),
    "age_clipped/": ("How old are the clipped tokens?", "Share of the clipped tokens, by age."),
}
"""Panels with a curve for every metric with this prefix. Left out if there would be only one curve."""
PEERS = {
    ("rank", "tokens"): ("Is the work balanced?", "Tokens of the texts that each rank was given, prompts included."),
    ("rank", "waiting"): (
        "Which rank waits for others?",
        "Seconds in collective operations of the update. The one that waits least is the slowest.",
    ),
    ("rank", "memory"): ("Memory of each rank", "The most that its process has held so far, in GiB."),
    ("engine", "tokens"): ("What does each engine write?", "Tokens since the last row."),
    ("engine", "waiting"): ("What does each engine have to do?", "Requests that it had not answered yet."),
}
"""Panels with a curve for every rank, or for every engine, if there are several."""
REWARD = "reward/"
NO_PARTS = ("reward/mean", "reward/zero_variance_fraction")

TIME = "time/"
"""Metrics whose sums are shown as one bar per run, and nowhere else."""


def panels_for(metrics: Iterable[str]) -> tuple[list[Panel], list[Panel]]:
    """The panels that have something to draw, and one for every other metric."""
    logged = list(dict.fromkeys(metrics))
    families = [_family(prefix, *words, logged) for prefix, words in FAMILIES.items()]
    peers = [_peers(kind, what, *words, logged) for (kind, what), words in PEERS.items()]
    families += [panel for panel in peers if len(panel.metrics) > 1]
    several = [panel for panel in families if len(panel.metrics) > 1]
    known = [panel for panel in PANELS if panel.metrics.keys() & set(logged)]
    known[1:1] = [*_reward_parts(logged), *(panel for panel in several if panel.percent)]
    known += [panel for panel in several if not panel.percent]
    known = [_with_intervals(panel, logged) for panel in known]
    placed = {name for panel in (*PANELS, *families, *known) for name in panel.shown}
    other = [name for name in sorted(logged) if name not in placed and not name.startswith(TIME)]
    alone = [_with_intervals(Panel(name, {name: name}), other) for name in other]
    ends = {end for panel in alone for pair in panel.intervals.values() for end in pair}
    return known, [panel for panel in alone if panel.title not in ends]


def _family(prefix: str, title: str, explains: str, logged: list[str]) -> Panel:
    labels = {metric: metric.removeprefix(prefix) for metric in sorted(logged) if metric.startswith(prefix)}
    return Panel(title, labels, explains, percent=tuple(labels) if prefix.startswith("eval/") else ())


def _peers(kind: str, what: str, title: str, explains: str, logged: list[str]) -> Panel:
    found = sorted(int(match[1]) for name in logged if (match := re.fullmatch(rf"{kind}/(\d+)/{what}", name)))
    return Panel(title, {f"{kind}/{number}/{what}": f"{kind} {number}" for number in found}, explains)


def _reward_parts(logged: list[str]) -> list[Panel]:
    """If the reward has several parts: the total, and each part."""
    parts = {name: name.removeprefix(REWARD) for name in sorted(logged) if name.startswith(REWARD)}
    parts = {name: label for name, label in parts.items() if name not in NO_PARTS}
    whole = {"reward/mean": "whole reward"} if "reward/mean" in logged else {}
    explains = "Mean of each part over the responses that have it, multiplied by its weight."
    return [Panel("What is the reward made of?", whole | parts, explains)] if parts else []


def _with_intervals(panel: Panel, logged: list[str]) -> Panel:
    """The panel with the intervals that were logged under its metrics' names with `_low` and `_high`."""
    ends = {name: (f"{name}_low", f"{name}_high") for name in panel.metrics}
    found = {name: pair for name, pair in ends.items() if {*pair} <= {*logged}}
    return replace(panel, intervals=panel.intervals | found) if found else panel


def interval_ends(metrics: Iterable[str]) -> dict[str, str]:
    """Metrics that are the end of an interval, and the metric that the interval belongs to.

    >>> interval_ends(["a/b", "a/b_low", "a/b_high", "c/d_low"])
    {'a/b_low': 'a/b', 'a/b_high': 'a/b'}
    """
    panels = (panel for kind in panels_for(metrics) for panel in kind)
    return {end: name for panel in panels for name, pair in panel.intervals.items() for end in pair}


def is_flat(panel: Panel, runs: list[dict[str, Any]]) -> bool:
    """Whether nothing that the panel draws changes in any run; `runs` are the columns of each. Single points are
    worth drawing, however few there are.

    >>> is_flat(Panel("", {"a": ""}), [{"a": {"values": [2, 2]}}, {"a": {"values": [3]}}])
    True
    >>> is_flat(Panel("", {"a": ""}, apart=True), [{"a": {"values": [2]}}])
    False
    """
    drawn = [run[name]["values"] for run in runs for name in panel.metrics if name in run]
    return not panel.apart and all(len(set(values)) < 2 for values in drawn)
