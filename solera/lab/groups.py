"""The effect of a small group on the advantage: its own mean and deviation replace those of the prompt.

The setting is on-policy, with one token per response, no clip and no weight, so that nothing else changes the gradient.
Every group is enumerated. Groups of equal rewards have no gradient and stay in the denominator. Leaving them out would
make a batch's gradient longer by 1/P(rewards differ), equally for all prompts.
"""

import math
from typing import Any

import torch
from rich.table import Table

from solera.diagnosis.exact import groups, policy_gradient, response_logp
from solera.lab.drawing import COLOURS, INK, canvas, sheet
from solera.lab.objectives import named
from solera.lab.options import LabOptions
from solera.lab.problem import EPSILON, WRONG_ARM, GradientEstimate, Track, bandit, cosine, estimate, written_by
from solera.objectives.objective import Objective

ADVANTAGES = ("mean", "leave_one_out", "whiten", "whiten_bessel")
SIZES = (2, 4, 8, 16, 32)
SUCCESS_RATES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)


def measure(options: LabOptions, track: Track) -> dict[str, Any]:
    """For each advantage and group size: scale by success rate, tilt over prompts, angle on graded rewards, noise.

    `scale` compares the expected gradient with that of an infinite group: ∇J, or ∇J/σ if the advantage is whitened.
    """
    sizes = SIZES[:3] if options.quick else SIZES
    rows = []
    for advantage in track(ADVANTAGES, "groups"):
        own = {"whiten_epsilon": EPSILON} if advantage == "whiten" else {}
        objective = named("reinforce", advantage=advantage, zero_variance_mask=False, **own)
        rows += [{"advantage": advantage, "size": size, **_figures(objective, advantage, size)} for size in sizes]
    return {"success_rates": list(SUCCESS_RATES), "rows": rows}


def _figures(objective: Objective, advantage: str, size: int) -> dict[str, Any]:
    whitened = advantage.startswith("whiten")
    found, wanted, scale, noise = [], [], [], []
    for p in SUCCESS_RATES:
        expected, exact = on_policy(objective, (1 - p, p), (0.0, 1.0), size)
        target = exact / math.sqrt(p * (1 - p) + EPSILON) if whitened else exact
        found.append(expected.mean_SV)
        wanted.append(target)
        scale.append(((expected.mean_SV * target).sum() / target.square().sum()).item())
        noise.append(math.sqrt(size * expected.variance) / expected.mean_SV.norm().item())
    graded, exact = on_policy(objective, *WRONG_ARM, size)
    return {
        "scale": scale,
        "noise_per_response": noise,
        "tilt_degrees": angle(cosine(torch.stack(found), torch.stack(wanted))),
        "graded_degrees": angle(cosine(graded.mean_SV, exact)),
    }


def on_policy(
    objective: Objective, probability: tuple[float, ...], reward: tuple[float, ...], size: int
) -> tuple[GradientEstimate, torch.Tensor]:
    """The objective's expected gradient on groups written by the bandit itself, and ∇J."""
    space, logits_SV, reward_B = bandit(probability, reward)
    everyone = groups(response_logp(space, logits_SV).exp(), size, limit=10_000, generator=torch.Generator())
    assert everyone.exact
    data = written_by(space, reward_B, logits_SV)
    found = estimate(objective, data, logits_SV, everyone, torch.Generator(), copies=1)
    return found, policy_gradient(space, logits_SV, reward_B)


def angle(cosine: float) -> float:
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))


def tables(measured: dict[str, Any]) -> list[Table]:
    shown = (0.02, 0.1, 0.5)
    columns = [measured["success_rates"].index(p) for p in shown]
    table = sheet("Groups: expected gradient relative to an infinite group, by success rate p",
                  "advantage", "G", *(f"p = {p}" for p in shown), "tilt °", "graded °", "noise")  # fmt: skip
    for row in measured["rows"]:
        table.add_row(
            row["advantage"], str(row["size"]), *(f"{row['scale'][i]:.3f}" for i in columns),
            f"{row['tilt_degrees']:.1f}", f"{row['graded_degrees']:.1f}",
            f"{row['noise_per_response'][columns[1]]:.1f}",
            end_section=row["size"] == measured["rows"][-1]["size"],
        )  # fmt: skip
    table.caption = (
        "tilt: angle over prompts of all success rates · graded: angle on the bandit with rewards 0, .8, 1 · "
        "noise: standard deviation per response, divided by the mean gradient, at p = .1"
    )
    return [table]


def draw(measured: dict[str, Any]) -> Any:
    figure, panels = canvas(2, 2, "What small groups do to the advantage (on-policy, exact)")
    rates, rows = measured["success_rates"], measured["rows"]
    sizes = sorted({row["size"] for row in rows})
    for colour, advantage in zip(COLOURS, ADVANTAGES, strict=True):
        own = [row for row in rows if row["advantage"] == advantage]
        style = {"color": colour, "marker": "o", "markersize": 4, "label": advantage,
                 "linestyle": "-" if advantage in ("mean", "whiten") else "--"}  # fmt: skip
        panels[0].plot(sizes, [row["scale"][rates.index(0.1)] for row in own], **style)
        panels[2].plot(sizes, [row["tilt_degrees"] for row in own], **style)
        panels[3].plot(sizes, [row["noise_per_response"][rates.index(0.1)] for row in own], **style)
    for i, row in enumerate(row for row in rows if row["advantage"] == "whiten"):
        strength = 0.25 + 0.75 * i / (len(sizes) - 1)
        panels[1].plot(rates, row["scale"], color=COLOURS[2], alpha=strength, label=f"G = {row['size']}")
    panels[0].set(title="Size of the gradient, success rate .1 (1: infinite group)", ylim=(0, 1.25))
    panels[1].set(title="whiten: which prompts a small group weakens", xlabel="success rate", ylim=(0, 1.3))
    panels[2].set(title="Angle over prompts of all success rates (°)", ylim=(-0.5, 18))
    panels[3].set(title="Noise per response, success rate .1", ylim=(0, 3.6))
    for panel in (panels[0], panels[2], panels[3]):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set_xlabel("group size")
    for panel in panels[:2]:
        panel.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    for panel in panels:
        panel.legend(frameon=False, fontsize=8, ncols=4 if panel is not panels[1] else 5, loc="upper center")
    return figure
