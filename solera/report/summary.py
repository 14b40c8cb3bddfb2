"""What a page says of a run besides its curves: its columns of numbers, its main figures, its settings."""

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

from solera.config import Config, override
from solera.diagnosis.verdict import HARMFUL, STATE_WORDS
from solera.errors import SoleraError
from solera.objectives.table import resolve_config
from solera.report.decimation import MOST_POINTS, decimated, means
from solera.report.panels import TIME, interval_ends
from solera.report.run_folder import RunFolder
from solera.report.stalling import compares, stall

ACCURACY = "eval/pass@1"
WASTE = "waste/"
STALE = f"{WASTE}stale"
"""Of the tokens trained on; every other waste is of those that were not."""
CHOOSING = {"task": ("name", "path"), "objective": ("name",), "model": ("path",), "lora": ("rank",)}
"""Fields that other fields' defaults depend on."""


def columns(run: RunFolder) -> dict[str, Any]:
    """The curves of a run. `steps` holds each list of steps once; a metric names its list by place.

    A curve of more points than a page needs is decimated, and comes with its `means`: steps and values to smooth.
    """
    names = dict.fromkeys(name for row in run.rows for name in row if name != "step")
    infinite = [name for name in names if not all(math.isfinite(row.get(name, 0)) for row in run.rows)]
    if infinite:
        run.notes.append(f"Some values are not finite and are not drawn: {', '.join(infinite)}.")
    if len(run.rows) > MOST_POINTS:
        run.notes.append(f"A curve here has at most {MOST_POINTS:,} points: the lowest and highest of many steps.")
    lists: dict[tuple[float, ...], int] = {}
    middle_of = interval_ends(names)
    metrics = {name: _column(run, name, middle_of.get(name, name), lists) for name in names}
    return {"steps": [list(steps) for steps in lists], "metrics": metrics, "syncs": _syncs(run)}


def _column(run: RunFolder, name: str, middle: str, lists: dict[tuple[float, ...], int]) -> dict[str, Any]:
    """Ends of an interval are kept at the steps at which its middle is."""
    points = run.points(name)
    kept = decimated(points)
    if middle != name:
        steps = {step for step, _ in decimated(run.points(middle))}
        kept = [point for point in points if point[0] in steps]
    place = lists.setdefault(tuple(step for step, _ in kept), len(lists))
    column: dict[str, Any] = {"steps": place, "values": [_number(value) for _, value in kept]}
    if len(points) > len(kept):
        column["means"] = [[_number(number) for number in numbers] for numbers in zip(*means(points), strict=True)]
    return column


def _number(value: float) -> float:
    """Six digits are more than a curve shows, and a third of the text."""
    return float(f"{value:.6g}")


def _syncs(run: RunFolder) -> list[float]:
    """Steps at which the engine was given weights; of many every second, third … one."""
    counts = [(-1.0, 0.0), *run.points("sync/count")]
    steps = [after[0] for before, after in itertools.pairwise(counts) if after[1] > before[1]]
    return steps[:: -(-len(steps) // MOST_POINTS) or 1]


def main_figures(run: RunFolder) -> dict[str, Any]:
    """Accuracy before and after, and the settings and sums that tell one run from another."""
    accuracies = run.points(ACCURACY)
    if run.rows and not accuracies:
        run.notes.append("The run holds no evaluation: its accuracy is not known.")
    stalled = stall(run.rows, accuracies[-1][1] if accuracies else None)
    advantage, masked = (run.setting("objective", name) for name in ("advantage", "zero_variance_mask"))
    if stalled and "objective" not in run.own_code and compares(advantage, bool(masked)):
        run.notes.append(f"{stalled[0].upper()}{stalled[1:]}.")
    timed = [name for name in dict.fromkeys(name for row in run.rows for name in row) if name.startswith(TIME)]
    seconds = [name for name in timed if name.count("/") == 1]  # `time/sync/proof` is a part of `time/sync`
    learned = sum("tokens/trained" in row for row in run.rows)
    return {
        "finished": run.finished,
        "learned": learned,
        "planned": run.setting("run", "steps"),
        "accuracies": [accuracies[0], accuracies[-1]] if accuracies else [],
        "seconds": {name.removeprefix(TIME): run.total(name) for name in seconds},
        "facts": {
            "objective": run.setting("objective", "name"),
            **_pacing(run),
            "i (passes)": run.setting("learn", "passes"),
            "seed": run.setting("run", "seed"),
            "model": run.setting("model", "path"),
            "task": run.setting("task", "name"),
            "updates judged": _verdicts(run),
            "tokens generated": run.total("tokens/generated"),
            "tokens trained on": run.total("tokens/trained"),
            "tokens effective": run.total("tokens/effective") or None,
            "tokens wasted": _wasted(run),
        },
    }


def _pacing(run: RunFolder) -> dict[str, Any]:
    """How old its data may be. A run that generates nothing has no engine: it has neither a sync period nor a lag."""
    if not run.generates:
        return {"data": "offline: nothing is generated"}
    rule = run.setting("sync", "rule") or "every"
    period = run.setting("sync", "period") if rule == "every" else rule
    return {"v (sync period)": period, "offset": run.setting("collect", "offset")}


def _verdicts(run: RunFolder) -> str | None:
    """How many updates were certified, inconclusive and harmful, and when the first harmful one was."""
    judged = [(step, round(state)) for step, state in run.points("improvement/state")]
    if not judged:
        return None
    counts = Counter(STATE_WORDS[state] for _, state in judged)
    said = ", ".join(f"{counts[word]} {word}" for word in STATE_WORDS.values())
    harmful = [step for step, state in judged if state == HARMFUL]
    return said + (f" (first at step {harmful[0]:.0f})" if harmful else "")


def _wasted(run: RunFolder) -> str | None:
    """Tokens drawn in vain, reason by reason, the largest first, as shares of all that was drawn: what was trained on
    and what was not. Text may be drawn that the run did not generate, and more than once."""
    names = {name for row in run.rows for name in row if name.startswith(WASTE)}
    lost = {name: run.total(name) for name in names}
    drawn = run.total("tokens/trained") + sum(lost.values()) - lost.get(STALE, 0)
    said = [
        f"{name.removeprefix(WASTE).replace('_', ' ')} {lost[name] / drawn:.0%}"
        for name in sorted(lost, key=lambda name: (-lost[name], name))
        if drawn and lost[name] > 0
    ]
    return ", ".join(said) or None


def settings(runs: list[RunFolder]) -> list[dict[str, Any]]:
    """Every field of the config: its value in each run, its default, and whether it tells something.

    Between several runs that is a difference; in one run it is what differs from the default. Names differ always.
    """
    tables = [_flat(run.config) for run in runs]
    default = _flat(_defaults(runs[0]))
    known = [table for table in tables if table]
    listed = []
    for name in dict.fromkeys((*default, *(name for table in tables for name in table))):
        compared = [table.get(name) for table in known]
        if len(runs) == 1 and name in tables[0]:
            compared.append(default.get(name))
        tells = name != "run.name" and any(value != compared[0] for value in compared)
        values = [table.get(name) for table in tables]
        listed.append({"name": name, "values": values, "default": default.get(name), "differs": tells})
    return listed


def _defaults(run: RunFolder) -> dict[str, dict[str, Any]]:
    """What fields would have been with nothing given but what the task and the objective are."""
    plain, config = dataclasses.asdict(Config()), Config()
    for room, names in CHOOSING.items():
        config = override(config, room, **{name: run.setting(room, name) or plain[room][name] for name in names})
    try:
        chosen = dataclasses.asdict(resolve_config(config))
    except SoleraError:  # an objective of another version of the package
        return plain
    for room, names in CHOOSING.items():
        chosen[room] |= {name: plain[room][name] for name in names}
    return chosen


def _flat(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{room}.{name}": list(value) if isinstance(value, tuple) else value
        for room, table in tables.items()
        for name, value in table.items()
    }
