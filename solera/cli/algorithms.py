"""`solera algorithms`: list the objectives, or show one with all its fields."""

import dataclasses
from typing import get_args, get_type_hints

from solera.cli.options import filled, wrapped
from solera.config import ObjectiveConfig, help_of
from solera.errors import SoleraError
from solera.objectives.table import KL_FIELDS, PARTS, REFERENCE_UPDATES, TABLE, ObjectiveSpec, find, optional, resolve

HELP = """List all objectives and their purpose. With NAME, show one objective: its formula, constants and paper, and
all its fields with their meaning, default and possible values.

In the formulas, ℓ is the log-probability of a token under the current policy, b under the policy that wrote it, and f
under the reference policy. A is the advantage. ρ = exp(ℓ−b) is the ratio of a token, w the ratio of a whole response,
and s the geometric mean of ρ over a response. sg stops the gradient. Losses are minimised.
"""
FURTHER = """rec_…_is weights each token by its ratio, rec_…_nois does not; rec_…_wide has a wide clip range.
`solera algorithms NAME` shows the formula, constants, paper and fields of an objective. `solera train --objective NAME`
trains with it."""


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: solera algorithms [NAME]\n\n{wrapped(HELP)}")
    elif not arguments:
        print(_overview())
    elif len(arguments) == 1:
        print(_page(arguments[0]))
    else:
        raise SoleraError("algorithms takes at most one name (see solera algorithms --help)")
    return 0


def _overview() -> str:
    """One objective per line, so that all fit on one screen."""
    width = max(map(len, TABLE)) + 2
    lines = []
    for name, row in TABLE.items():
        default = "(default) " if name == ObjectiveConfig.name else ""
        lines.append(filled(f"{name:{width}}{default}{row.use}", " " * width))
    return "\n".join([*lines, "", wrapped(FURTHER)])


def _summary(name: str, row: ObjectiveSpec) -> str:
    shown = ("advantage", "aggregation", "zero_variance_mask", "refill", "drop", "regulariser", *row.constants)
    values = {field: getattr(resolve(ObjectiveConfig(name)), field) for field in shown}
    constants = ", ".join(
        f"{field} {_word(value)}" for field, value in values.items() if value not in (None, "none", False)
    )
    head = f"{name} (default)" if name == ObjectiveConfig.name else name
    below = (row.formula, constants, f"for: {row.use}", *([row.reference] if row.reference else []))
    return "\n".join([head, *(filled(f"  {line}", "    ") for line in below)])


def _page(name: str) -> str:
    row, resolved = find(name), resolve(ObjectiveConfig(name))
    explained, hints = help_of(ObjectiveConfig), get_type_hints(ObjectiveConfig)
    acting = {f.name: getattr(resolved, f.name) for f in dataclasses.fields(resolved) if f.name != "name"}
    lines = [_summary(name, row), "", "fields (set them with --objective.FIELD or under [objective]):"]
    for field, value in acting.items():
        if value is not None or field in optional(resolved):
            choices = [choice for hint in get_args(hints[field]) for choice in get_args(hint)]
            among = f" (one of {', '.join(map(str, choices))})" if choices else ""
            lines += [
                filled(f"  {field} {'is unset' if value is None else f'= {_word(value)}'}{among}", "    "),
                filled(f"      {explained[field]}", " " * 6),
            ]
    return "\n".join([*lines, *_further(resolved)])


def _further(resolved: ObjectiveConfig) -> list[str]:
    """Fields that take effect with another choice."""
    lines = []
    for field, choices in PARTS.items():
        present = getattr(resolved, field)
        for choice, brought in choices.items():
            idle = [name for name in brought if getattr(resolved, name) is None]
            if present is not None and choice != present and idle:
                lines.append(filled(f"  {field} = {_word(choice)} adds {', '.join(idle)}", "    "))
    if resolved.beta == 0:
        lines.append(f"  beta above 0 adds {', '.join((*KL_FIELDS, *REFERENCE_UPDATES))}")
    return ["", "fields that another choice adds:", *lines] if lines else []


def _word(value: object) -> str:
    """The value as TOML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
