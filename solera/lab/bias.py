"""Each objective's gradient compared with the exact policy gradient, on data of a given lag.

A prompt has seven responses of one or two tokens; two of them are right. The policy has taken as many steps along ∇J as
the largest lag. α is the policy of `lag` updates ago. It is also the reference. A batch holds thousands of groups.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from solera.diagnosis.exact import Groups, Space, divergences, groups, policy_gradient, response_logp, space_of
from solera.errors import counted
from solera.lab.drawing import COLOURS, FAINT, INK, canvas, name_below, sheet, short
from solera.lab.objectives import named
from solera.lab.options import LabOptions
from solera.lab.problem import Data, Track, cosine, estimate, written_by
from solera.objectives.objective import Objective

RATE, PROBLEMS, MOST_GROUPS = 0.5, 5, 1000
APART = 0.2
"""Largest distance of two lags in the plot, in rows. Without it, equal values would hide each other."""


@dataclass(frozen=True)
class Stale:
    """A policy, and groups written by an older policy."""

    seed: int
    lag: int
    logits_SV: Tensor
    data: Data
    groups: Groups
    divergence: dict[str, float]


def measure(options: LabOptions, track: Track) -> dict[str, Any]:
    """Measure each objective on each problem at each lag.

    `cosine`: cosine between the expected gradient E and ∇J. `scale`: |E|/|∇J|. `bias`: |E − ∇J|/|∇J|. `variance`:
    relative to |∇J|². `noise`: standard deviation of one group's gradient, divided by |E|.
    """
    space = space_of(3, 2)
    seeds = range(options.seed, options.seed + (1 if options.quick else PROBLEMS))
    situations = [stale for seed in seeds for stale in situated(space, seed, options.lags, options.group_size)]
    rows = []
    for name in track(options.objectives, "bias"):
        objective = named(name, options.clip)
        rows += [
            {"objective": name, "seed": stale.seed, "lag": stale.lag, **compare(objective, stale)}
            for stale in situations
        ]
    tv = {lag: median(s.divergence["tv"] for s in situations if s.lag == lag) for lag in options.lags}
    exact = all(stale.groups.exact for stale in situations)
    return {"tv": tv, "group_size": options.group_size, "problems": len(seeds), "exact": exact, "rows": rows}


def situated(space: Space, seed: int, lags: tuple[int, ...], size: int) -> list[Stale]:
    """One random problem at each lag. The policy is the same; the policy that wrote the groups differs."""
    path, reward_B = climb(space, seed, max(lags))
    found = []
    for lag in lags:
        behaviour_SV = path[-1 - lag]
        generator = torch.Generator().manual_seed(seed)
        written = groups(response_logp(space, behaviour_SV).exp(), size, MOST_GROUPS, generator)
        divergence = divergences(space, path[-1], behaviour_SV)
        found.append(Stale(seed, lag, path[-1], written_by(space, reward_B, behaviour_SV), written, divergence))
    return found


def climb(space: Space, seed: int, steps: int) -> tuple[list[Tensor], Tensor]:
    """The policies along `steps` exact gradient steps from a random start, and the rewards."""
    generator = torch.Generator().manual_seed(seed)
    reward_B = torch.zeros(len(space), dtype=torch.float64)
    reward_B[torch.randperm(len(space), generator=generator)[: len(space) // 3]] = 1
    path = [0.5 * torch.randn(space.prefixes, space.vocabulary, dtype=torch.float64, generator=generator)]
    for _ in range(steps):
        path.append(path[-1] + RATE * policy_gradient(space, path[-1], reward_B))
    return path, reward_B


def compare(objective: Objective, stale: Stale) -> dict[str, float | None]:
    exact_SV = policy_gradient(stale.data.space, stale.logits_SV, stale.data.reward_B)
    generator = torch.Generator().manual_seed(stale.seed)
    found = estimate(objective, stale.data, stale.logits_SV, stale.groups, generator)
    length = exact_SV.norm().item()
    return {
        "cosine": None if found.silent else cosine(found.mean_SV, exact_SV),
        "scale": found.mean_SV.norm().item() / length,
        "bias": (found.mean_SV - exact_SV).norm().item() / length,
        "variance": found.variance / length**2,
        "noise": found.noise,
    }


def tables(measured: dict[str, Any]) -> list[Table]:
    lags = ", ".join(f"{lag} (TV {short(tv)})" for lag, tv in measured["tv"].items())
    table = sheet(f"Bias against ∇J at lag {lags}", "objective", "cosine", "scale", "noise")
    for name in dict.fromkeys(row["objective"] for row in measured["rows"]):
        cells = (
            [short(_typical(measured, name, lag, key)) for lag in measured["tv"]]
            for key in ("cosine", "scale", "noise")
        )
        table.add_row(name, *(" ".join(f"{cell:>4}" for cell in row) for row in cells))
    how = "every group enumerated" if measured["exact"] else f"{MOST_GROUPS} groups drawn"
    table.caption = (
        f"groups of {measured['group_size']}, {how}; medians over {counted(measured['problems'], 'problem')}; "
        "–: no gradient is left in at least half of them"
    )
    return [table]


def _typical(measured: dict[str, Any], objective: str, lag: int, key: str) -> float | None:
    """Median over the problems that have a value. `None` if half of the problems or more have none."""
    values = [row[key] for row in measured["rows"] if (row["objective"], row["lag"]) == (objective, lag)]
    known = [value for value in values if value is not None]
    return median(known) if len(known) > len(values) / 2 else None


def draw(measured: dict[str, Any]) -> Any:
    names = list(dict.fromkeys(row["objective"] for row in measured["rows"]))
    figure, panels = canvas(1, 2, "Each objective's gradient on data of a given lag", height=1.2 + 0.2 * len(names))
    middle = (len(measured["tv"]) - 1) / 2
    for i, (lag, tv) in enumerate(measured["tv"].items()):
        row_N = [place + (i - middle) * min(APART, 0.3 / middle if middle else 0) for place in range(len(names))]
        for panel, key in zip(panels, ("cosine", "noise"), strict=True):
            values = [_typical(measured, name, lag, key) for name in names]
            drawn = [float("nan") if value is None else value for value in values]
            panel.plot(drawn, row_N, "o", color=COLOURS[i % len(COLOURS)], markersize=5, alpha=0.8,
                       label=f"lag {lag} (TV {tv:.2f})")  # fmt: skip
    panels[0].set(title="Direction: cosine with ∇J")
    panels[1].set(title="Noise of one group over the mean gradient", xlim=(0, None))
    for panel in panels:
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names), fontsize=8)
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.grid(axis="x", color=FAINT, linewidth=0.6)
    panels[0].axvline(0, color=INK, linewidth=0.8, linestyle=":")
    name_below(figure, panels[0])
    return figure
