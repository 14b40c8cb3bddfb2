"""What a page shows of a run besides its curves: columns of numbers, main figures and settings."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from typing import Any

from solera.config import Config, override
from solera.diagnosis.verdict import HARMFUL, STATE_WORDS
from solera.errors import SoleraError
from solera.folder.paths import ACCOUNT
from solera.objectives.table import resolve_config
from solera.report.decimation import MOST_POINTS, decimated, means
from solera.report.panels import TIME, interval_ends
from solera.report.run_folder import RunFolder
from solera.report.stalling import compares, stall

ACCURACY = "eval/pass@1"
WASTE = "waste/"
UNUSED = {
    "zero_variance": "equal rewards", "dropped": "dropped by the objective", "truncated": "cut off",
    "ungraded": "no reward", "left_out": "reward below the threshold",
}  # fmt: skip
"""Why drawn tokens teach nothing, by the last part of the metric's name. (`waste/stale` is no such reason: it counts
tokens that were trained on.)"""
CHOOSING = {
    "task": ("name", "path", "held_out_path", "parts", "weights"),
    "objective": ("name",),
    "model": ("path",),
    "lora": ("rank",),
}
"""Fields on which the defaults of other fields depend."""


def columns(run: RunFolder) -> dict[str, Any]:
    """Return the curves of a run. `steps` holds each distinct list of steps once; a metric refers to its list by index.

    A curve with more points than the page needs is decimated. It then comes with `means`, the steps and values from
    which the page draws the smoothed curve.
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
    """Return one curve. The two ends of an interval keep the same steps as its middle."""
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
    """Six digits are more than a curve shows, and shorten the text by a third."""
    return float(f"{value:.6g}")


def _syncs(run: RunFolder) -> list[float]:
    """Steps at which the engine received weights; if there are many, every second, third … one."""
    counts = [(-1.0, 0.0), *run.points("sync/count")]
    steps = [after[0] for before, after in itertools.pairwise(counts) if after[1] > before[1]]
    return steps[:: -(-len(steps) // MOST_POINTS) or 1]


def main_figures(run: RunFolder) -> dict[str, Any]:
    """Accuracy before and after, and the settings and sums that distinguish runs."""
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
        "account": _account(run),
        "seconds": {name.removeprefix(TIME): run.total(name) for name in seconds},
        "facts": {
            "objective": "your own code" if "objective" in run.own_code else run.setting("objective", "name"),
            **_pacing(run),
            "i (passes)": run.setting("learn", "passes"),
            "seed": run.setting("run", "seed"),
            "model": run.setting("model", "path"),
            "task": "your own code" if "task" in run.own_code else run.setting("task", "name"),
            "updates judged": _verdicts(run),
            "tokens for training": run.total("tokens/generated"),
            "tokens trained on": run.total("tokens/trained"),
            "tokens effective": round(run.total("tokens/effective")) or None,
            "drawn but unused": _unused(run),
        },
    }


def _account(run: RunFolder) -> dict[str, int]:
    """What became of the tokens, by name; empty if the run has not taken its account yet."""
    path = run.path / ACCOUNT
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    found = [_account_row(line) for line in reversed(lines) if line.strip()]
    row = next((row for row in found if row is not None), None)
    if found and found[0] is None:
        shown = "account of tokens is not known" if row is None else f"account shown is that of step {row['step']}"
        run.notes.append(f"The last line of account.jsonl is incomplete or damaged: the {shown}.")
    if row is None:
        return {}
    row = {name.removeprefix("tokens/"): tokens for name, tokens in row.items() if name != "step"}
    row["unexplained"] = 2 * row["generated"] - sum(row.values())
    return {
        name.replace("/", ": ").replace("_", " "): n for name, n in row.items() if n or name in ("generated", "trained")
    }


def _account_row(line: str) -> dict[str, int] | None:
    """The numbers of a line, or `None` if it is not a line of an account."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and all(type(number) is int for number in row.values())
    return row if whole and {"step", "tokens/generated", "tokens/trained"} <= row.keys() else None


def _pacing(run: RunFolder) -> dict[str, Any]:
    """How old the data may be. A run that generates nothing has no engine, and so neither a sync period nor a lag."""
    if not run.generates:
        return {"data": "offline: nothing is generated"}
    rule = "your own rule" if "rule" in run.own_code else run.setting("sync", "rule") or "every"
    period = run.setting("sync", "period") if rule == "every" else rule
    return {"v (sync period)": period, "offset": run.setting("collect", "offset")}


def _verdicts(run: RunFolder) -> str | None:
    """How many updates were certified, inconclusive and harmful, and the step of the first harmful one."""
    judged = [(step, round(state)) for step, state in run.points("improvement/state")]
    if not judged:
        return None
    counts = Counter(STATE_WORDS[state] for _, state in judged)
    said = ", ".join(f"{counts[word]} {word}" for word in STATE_WORDS.values())
    harmful = [step for step, state in judged if state == HARMFUL]
    return said + (f" (first at step {harmful[0]:.0f})" if harmful else "")


def _unused(run: RunFolder) -> str | None:
    """Tokens that were drawn but not learned from, by reason, the largest first, as shares of all that was drawn. A run
    may draw text that it did not generate, and may draw text more than once."""
    lost = {why: run.total(f"{WASTE}{name}") for name, why in UNUSED.items()}
    drawn = run.total("tokens/trained") + sum(lost.values())
    said = [
        f"{why} {tokens / drawn:.0%}" for why, tokens in sorted(lost.items(), key=lambda one: -one[1]) if tokens > 0
    ]
    return ", ".join(said) or None


def settings(runs: list[RunFolder]) -> list[dict[str, Any]]:
    """Return every field of the config: its value in each run, its default, and whether the page highlights it.

    With several runs, the page highlights fields that differ between them. With one run, it highlights fields that
    differ from their default. The run's name always differs, so it is never highlighted.
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
    """The defaults of all fields for the given task and objective."""
    plain, config = dataclasses.asdict(Config()), Config()
    for section, names in CHOOSING.items():
        given = {name: run.setting(section, name) or plain[section][name] for name in names}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        config = override(config, section, **given | lists)
    try:
        chosen = dataclasses.asdict(resolve_config(config))
    except (SoleraError, TypeError, AttributeError):  # the config was edited, or comes from another version of Solera
        return plain
    for section, names in CHOOSING.items():
        chosen[section] |= {name: plain[section][name] for name in names}
    return chosen


def _flat(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section, table in tables.items()
        for name, value in table.items()
    }
