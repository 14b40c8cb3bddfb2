"""Where repeated updates end, on the bandit that misleads unclipped REINFORCE. (docs/formulas.md, section 10, item 5)

Each batch is one group of 200 responses in α's exact proportions, so that its mean and deviation equal α's and the
update is the expected one. With `never`, α writes all data. With `sync`, the policy replaces α every `PERIOD` updates.
Objectives differ in the size of their gradients. Each learning rate is chosen so that the first update is as long as a
step along ∇J.
"""

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from solera.diagnosis.exact import policy_gradient, response_logp
from solera.lab.drawing import COLOURS, canvas, sheet, short
from solera.lab.objectives import named
from solera.lab.options import LabOptions
from solera.lab.problem import WRONG_ARM, Track, ascent, bandit, in_proportion, written_by
from solera.objectives.objective import Objective

RESPONSES, RATE, UPDATES, QUICK_UPDATES, PERIOD = 200, 1.0, 300, 30, 10
UNCLIPPED_IMPORTANCE = "reinforce (is)"
DRAWN = ("reinforce", UNCLIPPED_IMPORTANCE, "grpo", "rec_twoside_nois", "rec_twoside_nois_wide", "red_weight")


@dataclass(frozen=True)
class Walk:
    """Probabilities of the arms after each update, and the direction of the last update."""

    probability_NB: list[list[float]]
    last_way_V: list[float]


def walk(objective: Objective, updates: int, period: int | None, seed: int) -> Walk:
    """Full-batch gradient steps on the logits, starting at α. Every `period` updates the policy replaces α."""
    space, logits_SV, reward_B = bandit(*WRONG_ARM)
    generator = torch.Generator().manual_seed(seed)
    longest = policy_gradient(space, logits_SV, reward_B).norm()
    passed = [response_logp(space, logits_SV).exp().tolist()]
    for update in range(updates):
        if update == 0 or (period and update % period == 0):
            data = written_by(space, reward_B, logits_SV)
            member_G = in_proportion(response_logp(space, logits_SV).exp(), RESPONSES)
        uniform_G = torch.rand(RESPONSES, dtype=torch.float64, generator=generator)
        way_SV = ascent(objective, data, logits_SV, member_G, uniform_G)
        if update == 0:
            rate = RATE * longest / way_SV.norm()
        logits_SV = logits_SV + rate * way_SV
        passed.append(response_logp(space, logits_SV).exp().tolist())
    return Walk(passed, way_SV[0].tolist())


def measure(options: LabOptions, track: Track) -> list[dict[str, Any]]:
    """For each objective and both kinds of data: the arms' probabilities after every update, and J at the end."""
    objectives = {name: named(name, options.clip) for name in options.objectives}
    objectives[UNCLIPPED_IMPORTANCE] = named("reinforce", weight="importance")
    updates = QUICK_UPDATES if options.quick else UPDATES
    rows = []
    for name, objective in track(objectives.items(), "fixed_point"):
        for data, period in (("never", None), ("sync", PERIOD)):
            walked = walk(objective, updates, period, options.seed)
            end = walked.probability_NB[-1]
            rows.append({
                "objective": name, "data": data, "way": walked.last_way_V, "end": end,
                "expected_reward": sum(p * r for p, r in zip(end, WRONG_ARM[1], strict=True)),
                "path": walked.probability_NB,
            })  # fmt: skip
    return rows


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    table = sheet("Fixed points: α = [.3, .6, .1], r = [0, .8, 1], J(α) = .58",
                  "objective", "never synced", "J", "still moves at", f"sync every {PERIOD}", "J")  # fmt: skip
    for never, sync in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(
            never["objective"], _vector(never["end"], 2), short(never["expected_reward"]), _vector(never["way"], 3),
            _vector(sync["end"], 2), short(sync["expected_reward"]),
        )  # fmt: skip
    return [table]


def _vector(values: list[float], digits: int) -> str:
    return " ".join(short(value, digits) for value in values)


def draw(rows: list[dict[str, Any]]) -> Any:
    paths = {row["objective"]: row["path"] for row in rows if row["data"] == "never"}
    shown = [name for name in DRAWN if name in paths] or list(paths)[:6]
    figure, panels = canvas(2, 3, "Repeated updates on α's data: α = [.3, .6, .1], rewards 0, .8, 1", height=2.6)
    for panel, name in zip(panels, shown, strict=False):
        for arm, colour in enumerate((COLOURS[3], COLOURS[1], COLOURS[2])):
            label = f"arm {arm + 1}, reward {WRONG_ARM[1][arm]:g}"
            panel.plot([p[arm] for p in paths[name]], color=colour, linewidth=1.8, label=label)
        panel.set(title=name, ylim=(0, 1.02), xlabel="updates", ylabel="probability")
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    panels[0].legend(frameon=False, fontsize=8, loc="center right")
    return figure
