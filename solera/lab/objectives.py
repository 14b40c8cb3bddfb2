"""Objectives by name, with the lab's clip."""

from typing import Any

from solera.config import ObjectiveConfig
from solera.objectives.objective import Objective, compose
from solera.objectives.table import find, resolve

CLIPS = ("epsilon", "epsilon_low", "epsilon_high")


def named(name: str, clip: float | None = None, **fields: Any) -> Objective:
    """An objective with the given fields. `clip` sets the half-width of its clip band, if it has one."""
    if clip is not None:
        fields |= {field: clip for field in CLIPS if field in find(name).constants}
    return compose(resolve(ObjectiveConfig(name=name, **fields)))
