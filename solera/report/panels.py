"""Which metric is drawn where. One that no panel names gets a panel of its own, so that none is lost."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Panel:
    """A chart: the question it answers, the metrics it draws with their labels, and how."""

    title: str
    metrics: dict[str, str]
    explains: str = ""
    stepped: bool = False
    """Values hold until the next one; they are not smoothed."""
    syncs: bool = False
    """Mark the steps at which the engine was given weights."""
    read_out: dict[str, str] = field(default_factory=dict)
    """Metrics that are read at the pointer and not drawn."""


PANELS = (
    Panel(
        "Does it learn?",
        {"eval/pass@1": "held-out accuracy", "reward/mean": "reward of the batch"},
        "Accuracy is of the learner's weights on problems it never trains on; reward is of the responses drawn.",
    ),
    Panel(
        "How old is the data it learns from?",
        {"age/mean": "mean age", "age/max": "oldest response"},
        "Batches learned from since a response was written. The strip below marks every sync.",
        stepped=True,
        syncs=True,
        read_out={"sync/version": "engine holds version"},
    ),
    Panel(
        "How far is the policy from who wrote the data?",
        {"divergence/tv_sequence": "TV of responses", "divergence/tv_token": "TV of tokens"},
        "Total variation between the policy that meets the batch and its authors: 0 is on-policy, 1 nothing in common.",
    ),
    Panel(
        "KL(author‖policy)",
        {"divergence/kl": "KL"},
        "In nats a response. An estimate: it may fall a little below 0.",
    ),
    Panel(
        "How much of the batch would count?",
        {"divergence/ess": "effective sample size"},
        "Share of the responses that an importance-weighted mean would effectively use.",
    ),
    Panel(
        "What teaches nothing?",
        {"clip/fraction": "tokens clipped", "reward/zero_variance_fraction": "groups of equal reward"},
        "Tokens whose gradient the clip silenced; groups in which no response was better than another.",
    ),
    Panel("Entropy of the policy", {"policy/entropy": "entropy"}, "Nats a token. Near 0 nothing new is tried."),
    Panel("Gradient norm", {"learn/grad_norm": "before clipping"}, "Mean over the step's optimiser steps."),
    Panel("Learning rate", {"learn/lr": "learning rate"}, stepped=True),
    Panel("Length of a response", {"response/length": "tokens"}, "Mean, the end token included."),
    Panel("Responses cut off", {"response/truncated": "share"}, "Share that the limit of tokens cut off."),
)

FAMILIES = {
    "origin_tokens": ("Who wrote what it learns from?", "Share of the tokens in the loss, by who wrote them."),
    "origin_weight": ("Whose text moves the policy?", "Share of the gradient: the sum of |∂loss/∂log π| over tokens."),
    "origin_clipped": ("Whose tokens are clipped?", "Share of the tokens whose gradient the clip silenced."),
    "age_tokens": ("How old are its tokens?", "Share of the tokens in the loss, by age in batches."),
    "age_weight": ("How old is what moves the policy?", "Share of the gradient, by age."),
    "age_clipped": ("How old are the clipped tokens?", "Share of the clipped tokens, by age."),
}
"""Panels with a curve for every metric of a name before the stroke; left out where there would be one curve."""

TIME = "time/"
"""Metrics whose sums are shown as one bar a run, and drawn nowhere else."""


def panels_for(metrics: Iterable[str]) -> tuple[list[Panel], list[Panel]]:
    """The panels above that have something to draw, and one for every metric that they leave out."""
    logged = list(dict.fromkeys(metrics))
    families = [_family(name, *words, logged) for name, words in FAMILIES.items()]
    known = [panel for panel in PANELS if panel.metrics.keys() & set(logged)]
    known += [panel for panel in families if len(panel.metrics) > 1]
    placed = {name for panel in (*PANELS, *families) for name in (*panel.metrics, *panel.read_out)}
    other = [name for name in logged if name not in placed and not name.startswith(TIME)]
    return known, [Panel(name, {name: name}) for name in sorted(other)]


def _family(name: str, title: str, explains: str, logged: list[str]) -> Panel:
    labels = {metric: metric.partition("/")[2] for metric in sorted(logged) if metric.startswith(f"{name}/")}
    return Panel(title, labels, explains)
