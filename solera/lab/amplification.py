"""GRPO with a KL term on a bandit with rewards 0 and 1, optimised fully at every step.

Let p be the success rate of the policy that wrote the data. The optimum of `E[w·A] − β·KL(π‖π_ref)` has
`logit p' = logit p_ref + 1/(β·√(p(1−p)+ε))` (docs/formulas.md, section 10, item 6; Mroueh et al.). The code uses logits
throughout, because a probability near 1 has no digits left.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from rich.table import Table

from solera.diagnosis.exact import token_logp
from solera.lab.drawing import COLOURS, FAINT, INK, canvas, name_below, sheet
from solera.lab.objectives import named
from solera.lab.options import LabOptions
from solera.lab.problem import EPSILON, Data, Track, ascent, bandit

CASES = ((0.1, 2.0), (0.3, 1.0), (0.001, 5.0))
"""Success rate of π_ref, and β. The cases show two stable fixed points, certain success, and a cycle."""
ITERATIONS, OPTIMISED, SWAPS = 60, 8, 4
LARGEST_GROUP = 2000


def logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


def success(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _variance(x: float) -> float:
    return success(x) * success(-x)


def step(x: float, ref: float, beta: float) -> float:
    """The closed form: the logit of p_n, given that of p_{n−1}."""
    return ref + 1 / (beta * math.sqrt(_variance(x) + EPSILON))


def slope(x: float, beta: float) -> float:
    """Derivative of `step`. A fixed point is stable if the derivative lies between −1 and 1."""
    return -_variance(x) * (1 - 2 * success(x)) / (2 * beta * (_variance(x) + EPSILON) ** 1.5)


def fixed_points(ref: float, beta: float) -> list[float]:
    """All fixed points of `step` (as logits), up to the resolution of a grid."""
    highest = ref + 1 / (beta * math.sqrt(EPSILON)) + 1
    grid = [ref + (highest - ref) * i / 4000 for i in range(4001)]
    return [
        bisect(lambda x: step(x, ref, beta) - x, a, b)
        for a, b in pairwise(grid)
        if (step(a, ref, beta) > a) != (step(b, ref, beta) > b)
    ]


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The point between `low` and `high` where a function changes sign."""
    rising = function(high) > 0
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (low, middle) if (function(middle) > 0) == rising else (middle, high)
    return (low + high) / 2


def optimised(x: float, ref: float, beta: float) -> float:
    """The same step, computed by minimising the loss of `grpo` with a clip band that no ratio leaves.

    The data is one group with failures and successes in α's proportion, rounded to at most 2000 responses.
    """
    rate = Fraction(success(x)).limit_denominator(LARGEST_GROUP)
    objective = named("grpo", epsilon_low=1.0, epsilon_high=1e9, beta=beta, whiten_epsilon=EPSILON)
    space, behaviour_SV, reward_B = bandit((1 - float(rate), float(rate)), (0.0, 1.0))
    data = Data(space, reward_B, token_logp(space, behaviour_SV), token_logp(space, _policy(ref)))
    count = torch.tensor([rate.denominator - rate.numerator, rate.numerator])
    member_G = torch.arange(2).repeat_interleave(count)
    uniform_G = torch.zeros(len(member_G), dtype=torch.float64)
    return bisect(lambda y: ascent(objective, data, _policy(y), member_G, uniform_G)[0, 1].item(), ref - 1, 19.0)


def _policy(x: float) -> torch.Tensor:
    return torch.tensor([[0.0, x]], dtype=torch.float64)


def measure(options: LabOptions, track: Track) -> list[dict[str, Any]]:
    """For each case: the iteration from π_ref in closed form and by optimisation, all fixed points, and the effect of
    replacing the reference by the result."""
    return [_case(p_ref, beta, 3 if options.quick else OPTIMISED) for p_ref, beta in track(CASES, "amplification")]


def _case(p_ref: float, beta: float, optimisations: int) -> dict[str, Any]:
    ref = logit(p_ref)
    closed, real, swapped = [ref], [ref], [ref]
    for _ in range(ITERATIONS):
        closed.append(step(closed[-1], ref, beta))
    for _ in range(optimisations):
        real.append(optimised(real[-1], ref, beta))
    for _ in range(SWAPS):
        swapped.append(fixed_points(swapped[-1], beta)[0])
    points = [{"p": success(x), "logit": x, "attracts": abs(slope(x, beta)) < 1} for x in fixed_points(ref, beta)]
    return {
        "p_ref": p_ref,
        "beta": beta,
        "closed_form": [success(x) for x in closed],
        "optimised": [success(x) for x in real],
        "fixed_points": points,
        "reference_swapped": [success(x) for x in swapped],
    }


def tables(cases: list[dict[str, Any]]) -> list[Table]:
    table = sheet("Success amplification: GRPO with KL, each step fully optimised",
                  "p_ref", "β", "fixed points", "p₁ p₂ p₃", "ends", "error")  # fmt: skip
    for case in cases:
        points = " ".join(f"{point['p']:.3g}{'*' if point['attracts'] else ''}" for point in case["fixed_points"])
        first, last = case["closed_form"][1:4], case["closed_form"][-2:]
        ends = f"{last[1]:.3g}" if math.isclose(*last, rel_tol=1e-3) else f"{last[0]:.3g} ⇄ {last[1]:.3g}"
        error = max(abs(a - b) for a, b in zip(case["optimised"], case["closed_form"], strict=False))
        table.add_row(f"{case['p_ref']:g}", f"{case['beta']:g}", points, " ".join(f"{p:.3g}" for p in first), ends,
                      f"{error:.0e}")  # fmt: skip
    table.caption = "* stable · error: the largest difference between minimising grpo's loss and the closed form"
    return [table]


def draw(cases: list[dict[str, Any]]) -> Any:
    figure, panels = canvas(2, len(cases), "Success amplification: GRPO with KL, iterated")
    for top, bottom, case in zip(panels[: len(cases)], panels[len(cases) :], cases, strict=True):
        _map(top, case)
        _iteration(bottom, case)
    name_below(figure, panels[0], panels[-1])
    return figure


def _map(panel: Any, case: dict[str, Any]) -> None:
    ref, beta = logit(case["p_ref"]), case["beta"]
    low = min(case["closed_form"])
    xs = [logit(low / 2) + (logit(0.9999) - logit(low / 2)) * i / 400 for i in range(401)]
    panel.plot(xs, xs, color=FAINT, linewidth=1.2)
    panel.plot(xs, [step(x, ref, beta) for x in xs], color=COLOURS[0], linewidth=1.8, label="one step")
    path = [logit(min(p, 1 - 1e-12)) for p in case["closed_form"][:14]]
    walked = [(a, c) for a, b in pairwise(path) for c in (a, b)]
    panel.plot(*zip(*walked, strict=True), color=COLOURS[1], linewidth=0.9, label="iterated from π_ref")
    for point in (p for p in case["fixed_points"] if p["logit"] < xs[-1]):
        filled = {"color": INK} if point["attracts"] else {"markerfacecolor": "white", "markeredgecolor": INK}
        panel.plot(point["logit"], point["logit"], "o", markersize=6, zorder=5, **filled)
    panel.set(title=f"p_ref = {case['p_ref']:g}, β = {beta:g}", xlim=(xs[0], xs[-1]), ylim=(xs[0], xs[-1] + 2))
    ticks = [p for p in (0.001, 0.02, 0.3, 0.9, 0.999) if xs[0] <= logit(p) <= xs[-1]]
    panel.set_xticks([logit(p) for p in ticks], [f"{p:g}" for p in ticks])
    panel.set_yticks([logit(p) for p in ticks], [f"{p:g}" for p in ticks])
    panel.set(xlabel="success rate before (logit scale)", ylabel="after")


def _iteration(panel: Any, case: dict[str, Any]) -> None:
    shown = case["closed_form"][:25]
    panel.plot(range(len(shown)), shown, "o-", color=COLOURS[1], markersize=3, linewidth=1, label="closed form")
    panel.plot(range(len(case["optimised"])), case["optimised"], "x", color=COLOURS[2], markersize=8,
               label="grpo's loss, minimised")  # fmt: skip
    panel.axhline(case["p_ref"], color=INK, linewidth=0.8, linestyle=":", label="π_ref")
    panel.set(xlabel="iteration", ylabel="success rate", ylim=(0, 1.1 * max(shown)))
