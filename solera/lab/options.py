"""What can be asked of the lab. No torch, so that help answers at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from solera.config import LARGEST
from solera.errors import SoleraError
from solera.objectives.table import RING, TABLE, find

MOST = 10_000
"""Largest group and lag: what is exact takes its time."""
WIDEST_CLIP = RING["ring_low"]
Experiment = Literal["bias", "groups", "fixed_point", "amplification"]
Experiments = Annotated[tyro.conf.Positional[tuple[Experiment, ...]], tyro.conf.arg(metavar="[EXPERIMENT ...]")]


@dataclass(frozen=True)
class LabOptions:
    """Exact answers on policies small enough to enumerate."""

    experiments: Experiments = ("bias", "groups", "fixed_point", "amplification")
    """`bias`: each objective's gradient against the exact one. `groups`: what small groups do to the advantage.
    `fixed_point`: where repeated updates end. `amplification`: GRPO with a KL term, iterated."""
    out: str | None = None
    """Folder for the plots and for `lab.json`, which holds every number. By default runs/lab, with `quick`
    runs/lab-quick; experiments not asked for stay there as they are."""
    seed: int = 0
    """Seed of the policy and the rewards of `bias`, and of groups where they are drawn."""
    quick: bool = False
    """Fewer problems, group sizes and updates."""
    objectives: tuple[str, ...] = tuple(TABLE)
    """Objectives of `bias` and `fixed_point`."""
    lags: tuple[int, ...] = (0, 4, 16)
    """`bias`: how many updates older than the policy its data is."""
    group_size: int = 4
    """`bias`: responses in a group."""
    clip: float | None = None
    """`bias` and `fixed_point`: half-width of the clip, in place of each objective's own."""


def check(options: LabOptions) -> LabOptions:
    """Refuse, in one line, what no experiment could use."""
    for name in options.objectives:
        find(name)
    if not options.objectives:
        raise SoleraError("--objectives is empty; name one or more (see solera algorithms)")
    if not 0 <= options.seed <= LARGEST:
        raise SoleraError(f"--seed is {options.seed}; it must be at least 0 and have at most 18 digits")
    if not 2 <= options.group_size <= MOST:
        raise SoleraError(
            f"--group_size is {options.group_size}; it must be at least 2, as one response has no baseline, and at "
            f"most {MOST}"
        )
    if min(options.lags, default=-1) < 0 or max(options.lags) > MOST:
        raise SoleraError(f"--lags is {options.lags}; give one or more whole numbers, none below 0 or above {MOST}")
    if options.clip is not None and not 0 < options.clip <= WIDEST_CLIP:
        raise SoleraError(f"--clip is {options.clip}; it must be above 0 and at most {WIDEST_CLIP}, where rings begin")
    return options
