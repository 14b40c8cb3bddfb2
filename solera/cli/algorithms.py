"""`solera algorithms`: the table of objectives, and one of them with all its fields."""

import dataclasses
from typing import get_args, get_type_hints

from solera.cli.options import filled, wrapped
from solera.config import ObjectiveConfig, help_of
from solera.errors import SoleraError
from solera.objectives.table import KL_FIELDS, PARTS, REFERENCE_UPDATES, TABLE, Row, find, optional, resolve

HELP = """Without a name, what each objective is for. With one, its formula, constants and reference, and all of its
fields: what each means, the value it takes where it is left unset, and what it may be replaced by.

ℓ is the policy's log-probability of a token, b the author's, f the reference policy's, A the advantage; ρ = exp(ℓ−b) of
a token, w of a whole response, s their geometric mean; sg stops the gradient. Losses are minimised.
"""
FURTHER = """rec_…_is weighs each token by its ratio, rec_…_nois does not; rec_…_wide has a wide clip.
`solera algorithms NAME` shows an objective's formula, constants, reference and fields; `solera train --objective NAME`
trains with it."""


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: solera algorithms [NAME]\n\n{wrapped(HELP)}")
    elif not arguments:
        print(_overview())
    elif len(arguments) == 1:
        print(_page(arguments[0]))
    else:
        raise SoleraError("algorithms takes one name, or none (see solera algorithms --help)")
    return 0


def _overview() -> str:
    """One objective a line, so that all can be seen at once."""
    width = max(map(len, TABLE)) + 2
    lines = []
    for name, row in TABLE.items():
        default = "(default) " if name == ObjectiveConfig.name else ""
        lines.append(filled(f"{name:{width}}{default}{row.use}", " " * width))
    return "\n".join([*lines, "", wrapped(FURTHER)])


def _summary(name: str, row: Row) -> str:
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
    lines = [_summary(name, row), "", "fields, as --objective.FIELD or under [objective]:"]
    for field, value in acting.items():
        if value is not None or field in optional(resolved):
            choices = [choice for hint in get_args(hints[field]) for choice in get_args(hint)]
            among = f" (of {', '.join(map(str, choices))})" if choices else ""
            lines += [
                filled(f"  {field} {'is unset' if value is None else f'= {_word(value)}'}{among}", "    "),
                filled(f"      {explained[field]}", " " * 6),
            ]
    return "\n".join([*lines, *_further(resolved)])


def _further(resolved: ObjectiveConfig) -> list[str]:
    """Fields that begin to act with another choice."""
    lines = []
    for field, choices in PARTS.items():
        present = getattr(resolved, field)
        for choice, brought in choices.items():
            idle = [name for name in brought if getattr(resolved, name) is None]
            if present is not None and choice != present and idle:
                lines.append(filled(f"  {field} = {_word(choice)} brings {', '.join(idle)}", "    "))
    if resolved.beta == 0:
        lines.append(f"  beta above 0 brings {', '.join((*KL_FIELDS, *REFERENCE_UPDATES))}")
    return ["", "with another choice:", *lines] if lines else []


def _word(value: object) -> str:
    """As in TOML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
