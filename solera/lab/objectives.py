"""Objectives by name, with the lab's clip where they have one."""

from typing import Any

from solera.config import ObjectiveConfig
from solera.objectives.objective import Objective, compose
from solera.objectives.table import find, resolve

CLIPS = ("epsilon", "epsilon_low", "epsilon_high")


def named(name: str, clip: float | None = None, **fields: Any) -> Objective:
    """An objective with some fields of its own choice; `clip` becomes the half-width of its band where it has one."""
    if clip is not None:
        fields |= {field: clip for field in CLIPS if field in find(name).constants}
    return compose(resolve(ObjectiveConfig(name=name, **fields)))
