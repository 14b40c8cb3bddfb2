"""The options of the lab. Does not import torch, so that `--help` is fast."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from solera.config import LARGEST
from solera.errors import SoleraError
from solera.objectives.table import RING, TABLE, find

MOST = 10_000
"""Largest group and lag. Exact computation beyond this takes too long."""
WIDEST_CLIP = RING["ring_low"]
Experiment = Literal["bias", "groups", "fixed_point", "amplification"]
Experiments = Annotated[tyro.conf.Positional[tuple[Experiment, ...]], tyro.conf.arg(metavar="[EXPERIMENT ...]")]


@dataclass(frozen=True)
class LabOptions:
    """Exact experiments on policies small enough to enumerate."""

    experiments: Experiments = ("bias", "groups", "fixed_point", "amplification")
    """`bias`: each objective's gradient compared with the exact one. `groups`: the effect of small groups on the
    advantage. `fixed_point`: where repeated updates end. `amplification`: GRPO with a KL term, iterated."""
    out: str | None = None
    """Folder for the plots and for `lab.json`, which holds every number. The default is runs/lab, or runs/lab-quick
    with `quick`. Results of experiments that you do not choose stay unchanged."""
    seed: int = 0
    """Seed of the policy and the rewards of `bias`, and of groups that are sampled rather than enumerated."""
    quick: bool = False
    """Use fewer problems, group sizes and updates."""
    objectives: tuple[str, ...] = tuple(TABLE)
    """Objectives for `bias` and `fixed_point`."""
    lags: tuple[int, ...] = (0, 4, 16)
    """`bias`: age of the data, in updates."""
    group_size: int = 4
    """`bias`: responses in a group."""
    clip: float | None = None
    """`bias` and `fixed_point`: half-width of the clip. Unset, each objective uses its own."""


def check(options: LabOptions) -> LabOptions:
    """Refuse, in one line, values that no experiment can use."""
    for name in options.objectives:
        find(name)
    if not options.objectives:
        raise SoleraError("--objectives is empty; name one or more (see solera algorithms)")
    if not 0 <= options.seed <= LARGEST:
        raise SoleraError(f"--seed is {options.seed}; it must be at least 0 and have at most 18 digits")
    if not 2 <= options.group_size <= MOST:
        raise SoleraError(
            f"--group_size is {options.group_size}; it must be at least 2, because one response has no baseline, "
            f"and at most {MOST}"
        )
    if min(options.lags, default=-1) < 0 or max(options.lags) > MOST:
        raise SoleraError(f"--lags is {options.lags}; give one or more whole numbers between 0 and {MOST}")
    if options.clip is not None and not 0 < options.clip <= WIDEST_CLIP:
        raise SoleraError(f"--clip is {options.clip}; it must be above 0 and at most {WIDEST_CLIP}, where rings begin")
    return options
