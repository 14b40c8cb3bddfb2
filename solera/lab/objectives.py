"""Objectives by name, with the lab's clip where they have one."""

import dataclasses

from solera.config import ObjectiveConfig
from solera.objectives.objective import Objective, compose
from solera.objectives.table import find, resolve

CLIPS = ("epsilon", "epsilon_low", "epsilon_high")


def named(name: str, clip: float | None = None) -> Objective:
    """An objective with its own constants, or with `clip` for the half-width of its band."""
    own = {field: clip for field in CLIPS if clip is not None and field in find(name).constants}
    return compose(resolve(dataclasses.replace(ObjectiveConfig(name=name), **own)))
