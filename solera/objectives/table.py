"""The table of names: each objective is a composition of parts with its constants. No torch, so that it loads at once.

A name is a starting point. What a config leaves unset comes from its row; what the row cannot use is refused.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solera.config import AdvantageName, AggregationName, CollectConfig, Config, ObjectiveConfig, check, resolve_task
from solera.errors import SoleraError


@dataclass(frozen=True)
class Row:
    """One named objective. `constants` are the fields its policy term takes, with their defaults."""

    term: str
    advantage: AdvantageName
    aggregation: AggregationName
    constants: Mapping[str, Any]
    zero_variance_mask: bool = True
    refill: bool = False
    beta: float = 0.0
    entropy_bonus: float = 0.0


TABLE: dict[str, Row] = {
    "grpo": Row("ppo", "whiten", "sequence_mean", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    "off_policy_grpo": Row(
        "off_policy", "whiten", "sequence_mean", {"epsilon": 0.2, "centre": "one", "level": "token"}
    ),
}

SHARED = ("advantage", "aggregation", "zero_variance_mask", "refill", "beta", "entropy_bonus")
"""Fields that every objective has, with defaults in its row."""
KL_DEFAULTS: Mapping[str, Any] = {"kl": "k3", "kl_weight": "importance"}
"""Fields that act where beta is above 0 …"""
REFERENCE_UPDATES = ("ref_period", "ref_ema")
"""… and those that may stay unset even then."""


def find(name: str) -> Row:
    if name not in TABLE:
        close = difflib.get_close_matches(name, TABLE, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(TABLE)}"
        raise SoleraError(f"objective.name is {name!r}; {hint}")
    return TABLE[name]


def resolve(config: ObjectiveConfig) -> ObjectiveConfig:
    """The config with every field that acts filled in, and every field that cannot act refused."""
    row = find(config.name)
    defaults = {**{name: getattr(row, name) for name in SHARED}, **row.constants}
    beta = config.beta if config.beta is not None else row.beta
    if beta > 0:
        defaults |= KL_DEFAULTS
    for name in (f.name for f in dataclasses.fields(config) if f.name != "name"):
        if getattr(config, name) is None or name in defaults:
            continue
        if name not in (*KL_DEFAULTS, *REFERENCE_UPDATES):
            raise SoleraError(f"objective.{name} is not used by {config.name}: remove it")
        if not beta > 0:
            raise SoleraError(f"objective.{name} needs a reference policy: set objective.beta above 0 or remove it")
    filled = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    resolved = dataclasses.replace(config, **filled)
    _check(resolved)
    return resolved


def resolve_config(config: Config) -> Config:
    """Every value checked, every unset field of objective and task filled in: what can be said without torch."""
    check(config)
    objective = resolve(config.objective)
    if not objective.refill and config.collect.refill_rounds != CollectConfig.refill_rounds:
        raise SoleraError("collect.refill_rounds acts with objective.refill = true only: set that or remove it")
    if objective.refill and config.collect.offset:
        raise SoleraError(
            "objective.refill draws from the batches that collect.offset lets wait, so that their lag would not be "
            "kept: choose one"
        )
    return dataclasses.replace(config, objective=objective, task=resolve_task(config.task))


def describe() -> str:
    """Every name with the values its unset fields take, a line each."""
    lines = []
    for name, row in TABLE.items():
        fields = {field: getattr(row, field) for field in SHARED} | dict(row.constants)
        lines.append(f"  {name}: " + ", ".join(f"{field} {value}" for field, value in fields.items()))
    return "\n".join(lines)


def _check(c: ObjectiveConfig) -> None:
    def within(name: str, holds: bool, wanted: str) -> None:
        value = getattr(c, name)
        if value is not None and not holds:
            raise SoleraError(f"objective.{name} is {value}; it must be {wanted}")

    within("epsilon", (c.epsilon or 0) > 0, "above 0: an empty band clips everything")
    within("epsilon_low", 0 <= (c.epsilon_low or 0) <= 1, "between 0 and 1: ratios are never negative")
    within("epsilon_high", (c.epsilon_high or 0) >= 0, "at least 0")
    within("beta", (c.beta or 0) >= 0, "at least 0")
    within("entropy_bonus", (c.entropy_bonus or 0) >= 0, "at least 0")
    within("ref_period", (c.ref_period or 0) >= 1, "at least 1")
    within("ref_ema", 0 < (c.ref_ema or 0) < 1, "between 0 and 1, both excluded")
    if c.ref_period is not None and c.ref_ema is not None:
        raise SoleraError("objective.ref_period and objective.ref_ema both move the reference: choose one")
    if c.kl == "k1" and c.kl_weight == "none":
        raise SoleraError(
            "objective.kl = k1 without weight has no gradient in expectation: use k3, or kl_weight = importance"
        )
    if c.refill and not c.zero_variance_mask:
        raise SoleraError("objective.refill fills the places of masked groups: set objective.zero_variance_mask = true")


def notices(config: Config) -> list[str]:
    """Sentences worth saying once about a resolved config that is allowed."""
    said = []
    if config.objective.centre == "proximal" and config.learn.passes == config.learn.minibatches == 1:
        said.append(
            "with centre = proximal, one pass and one minibatch the clip cannot act: every ratio is at its centre"
        )
    return said
