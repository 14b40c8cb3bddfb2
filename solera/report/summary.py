"""What a page says of a run besides its curves: its columns of numbers, its main figures, its settings."""

import dataclasses
import math
from collections import Counter
from typing import Any

from solera.config import Config, override
from solera.diagnosis.verdict import HARMFUL, STATE_WORDS
from solera.errors import SoleraError
from solera.objectives.table import resolve_config
from solera.report.panels import TIME
from solera.report.run_folder import Row, RunFolder
from solera.report.stalling import compares, stall

MOST_ROWS = 2_000
"""Steps of a run that a page holds; of a longer run it holds every second, third … step and every evaluation."""
ACCURACY = "eval/pass@1"
WASTE = "waste/"
STALE = f"{WASTE}stale"
CHOOSING = {"task": ("name", "path"), "objective": ("name",), "model": ("path",), "lora": ("rank",)}
"""Fields that other fields' defaults depend on."""
"""Of the tokens trained on; every other waste is of those that were not."""


def columns(run: RunFolder) -> dict[str, Any]:
    """Steps, and for each metric a list of as many values, `None` where it was not logged or is not finite."""
    rows = _thinned(run)
    names = dict.fromkeys(name for row in run.rows for name in row if name != "step")
    infinite = [name for name in names if not all(math.isfinite(row.get(name, 0)) for row in run.rows)]
    if infinite:
        run.notes.append(f"Some values are not finite and are not drawn: {', '.join(infinite)}.")
    return {
        "steps": [row["step"] for row in rows],
        "metrics": {name: [_number(row.get(name)) for row in rows] for name in names},
    }


def _thinned(run: RunFolder) -> list[Row]:
    every = -(-len(run.rows) // MOST_ROWS)
    if every <= 1:
        return run.rows
    run.notes.append(f"The curves show one step in {every} and every evaluation, to keep the page small.")
    return [row for i, row in enumerate(run.rows) if i % every == 0 or any(name.startswith("eval/") for name in row)]


def _number(value: float | None) -> float | None:
    """Six digits are more than a curve shows, and a third of the text."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def main_figures(run: RunFolder) -> dict[str, Any]:
    """Accuracy before and after, and the settings and sums that tell one run from another."""
    accuracies = run.points(ACCURACY)
    if run.rows and not accuracies:
        run.notes.append("The run holds no evaluation: its accuracy is not known.")
    stalled = stall(run.rows, accuracies[-1][1] if accuracies else None)
    advantage, masked = (run.setting("objective", name) for name in ("advantage", "zero_variance_mask"))
    if stalled and "objective" not in run.own_code and compares(advantage, bool(masked)):
        run.notes.append(f"{stalled[0].upper()}{stalled[1:]}.")
    synced = run.setting("sync", "rule") or "every"
    seconds = [name for name in dict.fromkeys(name for row in run.rows for name in row) if name.startswith(TIME)]
    learned = sum("tokens/trained" in row for row in run.rows)
    return {
        "finished": run.finished,
        "learned": learned,
        "planned": run.setting("run", "steps"),
        "accuracies": [accuracies[0], accuracies[-1]] if accuracies else [],
        "seconds": {name.removeprefix(TIME): run.total(name) for name in seconds},
        "facts": {
            "objective": run.setting("objective", "name"),
            "v (sync period)": run.setting("sync", "period") if synced == "every" else synced,
            "i (passes)": run.setting("learn", "passes"),
            "offset": run.setting("collect", "offset"),
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
