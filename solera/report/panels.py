"""Which metric is drawn where. One that no panel names gets a panel of its own, so that none is lost."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from solera.diagnosis.verdict import STATE_WORDS


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
    words: dict[str, dict[int, str]] = field(default_factory=dict)
    """Metrics whose values are read as words."""
    apart: bool = False
    """Each value stands for itself: points, which no line joins."""
    interval: tuple[str, str] | None = None
    """The metrics that are the ends of the first one's interval."""
    pictured: bool = False
    """Drawn in `plot.png` as well."""
    floor: float = 0
    """What its axis reaches there at least: smaller values are rounding."""


PANELS = (
    Panel(
        "Does it learn?",
        {"eval/pass@1": "held-out accuracy", "reward/mean": "reward of the batch"},
        "Accuracy is of the learner's weights on problems it never trains on; reward is of the responses drawn.",
        pictured=True,
    ),
    Panel(
        "How old is the data it learns from?",
        {"age/mean": "mean age", "age/max": "oldest response"},
        "Batches learned from since a response was written. The strip below marks every sync.",
        stepped=True,
        syncs=True,
        read_out={"sync/version": "engine holds version"},
        pictured=True,
    ),
    Panel(
        "How far is the policy from who wrote the data?",
        {"divergence/tv_sequence": "TV of responses", "divergence/tv_token": "TV of tokens"},
        "Total variation between the policy that meets the batch and its authors: 0 is on-policy, 1 nothing in common.",
        pictured=True,
        floor=0.01,
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
        "Engine error",
        {"mismatch/logp": "mean difference of log-probabilities"},
        "Between engine and learner, on responses that the same weights wrote: what is left is arithmetic, not age.",
    ),
    Panel(
        "Did the update help?",
        {"improvement/estimate": "improvement"},
        "Change of the expected reward by one update, with its 95 % interval, on held-out prompts answered by the "
        "engine's policy: certified where all of it lies above 0, harmful where it lies below, else inconclusive.",
        apart=True,
        interval=("improvement/low", "improvement/high"),
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
        "The same as above, after the update, on the probe.",
        apart=True,
        read_out={"probe/kl": "KL", "probe/chi2": "χ²", "probe/ess": "effective sample size"},
    ),
    Panel(
        "What teaches nothing?",
        {"clip/fraction": "tokens clipped", "reward/zero_variance_fraction": "groups of equal reward"},
        "Tokens whose gradient the clip silenced; groups in which no response was better than another.",
        pictured=True,
    ),
    Panel(
        "Where do the tokens go?",
        {
            "tokens/generated": "generated",
            "tokens/graded": "drawn with a grade",
            "tokens/trained": "trained on",
            "tokens/effective": "effective",
        },
        "Tokens of a step. Effective are those trained on times their effective sample size.",
        read_out={
            "waste/zero_variance": "lost: group of equal rewards",
            "waste/dropped": "lost: dropped",
            "waste/truncated": "lost: cut off and masked",
            "waste/ungraded": "lost: without a grade",
            "waste/left_out": "lost: below the objective's threshold",
            "waste/stale": "lost: too far from who wrote them",
            "tokens/probe": "written for a probe",
        },
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
