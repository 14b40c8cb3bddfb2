"""Allowed values of an objective's fields. Does not import torch."""

from collections.abc import Mapping

from solera.config import ObjectiveConfig
from solera.errors import SoleraError

RANGES: Mapping[str, tuple[float, float, str]] = {
    "epsilon": (1e-300, float("inf"), "above 0: an empty band clips everything"),
    "epsilon_low": (0, 1, "between 0 and 1: ratios are never negative"),
    "epsilon_high": (0, float("inf"), "at least 0"),
    "ring_low": (0, 1, "between 0 and 1: ratios are never negative"),
    "ring_high": (0, float("inf"), "at least 0"),
    "dual_clip": (1 + 1e-9, float("inf"), "above 1: a token that has not moved has a ratio of 1"),
    "beta": (0, float("inf"), "at least 0"),
    "entropy_bonus": (0, float("inf"), "at least 0"),
    "ref_period": (1, float("inf"), "at least 1"),
    "ref_ema": (1e-300, 1 - 1e-16, "between 0 and 1, both excluded"),
    "regulariser_weight": (1e-300, float("inf"), "above 0: at 0 it does nothing"),
    "weight_temperature": (1e-300, float("inf"), "above 0"),
    "whiten_epsilon": (1e-12, float("inf"), "at least 1e-12: below that, rounding of equal rewards would count"),
    "advantage_tau": (1e-300, float("inf"), "above 0"),
    "tau": (1e-300, float("inf"), "above 0"),
    "tau_positive": (1e-300, float("inf"), "above 0"),
    "tau_negative": (1e-300, float("inf"), "above 0"),
    "cap": (1e-300, float("inf"), "above 0"),
    "weight_low": (0, float("inf"), "at least 0"),
    "weight_high": (1e-300, float("inf"), "above 0"),
    "second_moment": (0, float("inf"), "at least 0"),
    "tolerance": (0, 1, "between 0 and 1: it bounds a difference of probabilities"),
}
"""Lowest and highest allowed value of a field (inclusive), and the text for the error message."""


def check_together(c: ObjectiveConfig) -> None:
    """Refuse combinations of values that are wrong for every objective."""
    if c.ref_period is not None and c.ref_ema is not None:
        raise SoleraError("objective.ref_period and objective.ref_ema both move the reference: choose one")
    if c.kl == "k1" and c.kl_weight == "none":
        raise SoleraError(
            "objective.kl = k1 without weight has no gradient in expectation: use k3, or kl_weight = importance"
        )
    if c.ring_low is not None and c.epsilon_low is not None and c.ring_low < c.epsilon_low:
        raise SoleraError(f"objective.ring_low is {c.ring_low}; it must be at least epsilon_low, {c.epsilon_low}")
    if c.ring_high is not None and c.epsilon_high is not None and c.ring_high < c.epsilon_high:
        raise SoleraError(f"objective.ring_high is {c.ring_high}; it must be at least epsilon_high, {c.epsilon_high}")
    if c.weight_low is not None and c.weight_high is not None and c.weight_low >= c.weight_high:
        raise SoleraError(f"objective.weight_low is {c.weight_low}; it must be below weight_high, {c.weight_high}")
    if c.epsilon_low == c.epsilon_high == 0:
        raise SoleraError("objective.epsilon_low and epsilon_high are both 0: an empty band clips everything; widen it")
