"""What is wrong with the values of an option, in the words that a TOML file is given."""

import dataclasses
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from solera.config.fields import shown

LONGEST = 100
"""Characters of a value that are shown."""


class Option(NamedTuple):
    """What one option takes."""

    kind: Any
    """int, float, bool, str or a Literal."""
    amount: int | None
    """How many values; `None`: any number."""
    optional: bool
    """Whether `None` may be given."""


def complaint(defaults: type, arguments: list[str], flags: Any) -> str | None:
    """The first option with too few, too many or wrong values, and what it takes; None where it finds nothing wrong."""
    known = dict(_options(defaults, "", flags is tyro.conf.FlagConversionOff))
    for name, values in _given(arguments):
        option = known.get(name.replace("-", "_"))
        if option is not None and (wrong := _wrong(option, values)):
            return f"--{name} {wrong}"
    return None


def _given(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with what stands behind it."""
    name, values = "", list[str]()
    for argument in arguments:
        if option := re.match(r"--([A-Za-z_][\w.-]*)(?:=(.*))?$", argument, re.DOTALL):
            yield name, values
            name, values = option[1], [] if option[2] is None else [option[2]]
        else:
            values.append(argument)
    yield name, values


def _options(room: type, prefix: str, valued: bool) -> Iterator[tuple[str, Option]]:
    """Every option by each of its names. A truth value is `valued`, or its option stands alone."""
    for key, hint in get_type_hints(room, include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _options(kind, f"{prefix}{key}.", valued or tyro.conf.FlagConversionOff in marks)
            continue
        option = _option(kind, valued)
        renamed = [mark for mark in marks if getattr(mark, "aliases", None)]
        names = [alias.removeprefix("--") for mark in renamed for alias in mark.aliases]
        names += [mark.name if mark.prefix_name is False else f"{prefix}{mark.name or key}" for mark in renamed]
        yield from ((name, option) for name in names or [f"{prefix}{key}"])


def _option(hint: Any, valued: bool) -> Option:
    optional = get_origin(hint) in (Union, types.UnionType)
    kind = next(one for one in get_args(hint) if one is not type(None)) if optional else hint
    if get_origin(kind) is tuple:
        items = get_args(kind)
        return Option(items[0], None if items[1:] == (Ellipsis,) else len(items), optional)
    return Option(kind, 0 if kind is bool and not valued else 1, optional)


def _wrong(option: Option, values: list[str]) -> str | None:
    if option.amount is not None and len(values) != option.amount:
        takes = {0: "no value", 1: "one value"}.get(option.amount, f"{option.amount} values")
        return f"takes {takes}" + (f", not {len(values)}: {shown(values)}" if values else ", and none was given")
    if (option.optional and values == ["None"]) or all(_fits(value, option.kind) for value in values):
        return None
    several = option.amount is None or option.amount > 1
    given = repr(values if several else values[0])
    given = given if len(given) <= LONGEST else "too long a text"
    return f"is {given} but must be {'a list, each ' if several else ''}{_wanted(option.kind)}"


def _fits(text: str, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return text in get_args(kind)
    if kind is bool:
        return text in ("True", "False")
    try:
        return kind not in (int, float) or kind(text) is not None
    except ValueError:
        return False


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {int: "a whole number", float: "a number", bool: "true or false"}[kind]
