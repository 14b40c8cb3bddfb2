"""Check option names and values before tyro parses them.

tyro prints errors as boxes. These checks know the options from the dataclasses, and report a mistake in one line and in
the same words as for a TOML file.
"""

import dataclasses
import math
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from solera.config.fields import SYNONYMS, alike, shown

LONGEST = 100
"""Maximum length of a value in a message."""
POSITIONAL = ""
"""Name under which arguments are kept that belong to no option."""


class Option(NamedTuple):
    """What one option accepts."""

    kinds: tuple[Any, ...]
    """int, float, bool, str or a Literal. A value must fit one of them."""
    amount: int | None
    """Number of values. `None` means any number."""
    optional: bool
    """Whether `None` is accepted."""


NOTHING = Option((), 0, False)


def complaint(default: Any, arguments: list[str], flags: Any) -> str | None:
    """The first mistake in the arguments, or None. The fields of the dataclass instance `default` are the options."""
    options = _known(default, flags)
    positional = options[POSITIONAL]
    for name, values in _given(arguments):
        option = options.get(_plain(name))
        if option is None:
            return f"unknown option {name}{_hint(_plain(name), default, list(options))}"
        if positional.amount is None and option.amount is not None:  # what is left over is positional
            wrong = _wrong(name, option, values[: option.amount])
            wrong = wrong or _wrong(POSITIONAL, positional, values[option.amount :])
        else:
            wrong = _wrong(name, option, values)
        if wrong:
            return wrong
    return None


def surplus(default: Any, arguments: list[str], flags: Any) -> str | None:
    """The first argument that is exactly one value too many for the option before it."""
    options = _known(default, flags)
    for name, values in _given(arguments):
        amount = options.get(_plain(name), NOTHING).amount
        if amount is not None and len(values) == amount + 1:
            return values[-1]
    return None


def _given(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option, as it was typed, with the values after it."""
    name, values = POSITIONAL, list[str]()
    for argument in arguments:
        if not _is_option(argument):
            values.append(argument)
            continue
        yield name, values
        name, equals, value = argument.partition("=")
        values = [value] if equals else []
    yield name, values


def _is_option(argument: str) -> bool:
    if not argument.startswith("-") or argument == "-":
        return False
    try:
        float(argument)
    except ValueError:
        return True
    return False  # a negative number


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("-", "_") if name.startswith("--") else name


def _known(default: Any, flags: Any) -> dict[str, Option]:
    return {POSITIONAL: NOTHING, **dict(_options(default, "", flags is tyro.conf.FlagConversionOff))}


def _options(default: Any, prefix: str, valued: bool) -> Iterator[tuple[str, Option]]:
    """Every option under each of its names. A boolean takes a value if `valued`; otherwise it is a flag."""
    for key, hint in get_type_hints(type(default), include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        value = getattr(default, key)
        if dataclasses.is_dataclass(kind):
            yield from _options(value, f"{prefix}{key}.", valued or tyro.conf.FlagConversionOff in marks)
        elif tyro.conf.Positional in marks:
            yield POSITIONAL, _option(kind, valued)
        else:
            named = f"no_{key}" if kind is bool and value and not valued else key
            yield from ((name, _option(kind, valued)) for name in _names(prefix, named, marks))


def _names(prefix: str, key: str, marks: list[Any]) -> list[str]:
    """The name of an option, after its aliases."""
    name, aliases = f"{prefix}{key}", []
    for mark in marks:
        aliases += [alias.removeprefix("--") for alias in getattr(mark, "aliases", None) or ()]
        if own := getattr(mark, "name", None):
            name = own if mark.prefix_name is False else f"{prefix}{own}"
    return [*aliases, name]


def _option(hint: Any, valued: bool) -> Option:
    union = get_origin(hint) in (Union, types.UnionType)
    kinds = tuple(kind for kind in (get_args(hint) if union else (hint,)) if kind is not type(None))
    optional = union and type(None) in get_args(hint)
    if get_origin(kinds[0]) is tuple:
        items = get_args(kinds[0])
        return Option(items[:1], None if items[1:] == (Ellipsis,) else len(items), optional)
    return Option(kinds, 0 if hint is bool and not valued else 1, optional)


def _hint(unknown: str, default: Any, known: list[str]) -> str:
    """Options that may have been meant, or the fields of the section."""
    section, _, name = unknown.rpartition(".")
    own = sorted(option for option in known if option.split(".")[-1] == SYNONYMS.get(name, name))
    within = [option.removeprefix(f"{section}.") for option in known if section and option.startswith(f"{section}.")]
    if own and (not within or name in SYNONYMS):
        return f"; did you mean {' or '.join(f'--{option}' for option in own)}?"
    if within and (close := alike(name, within, 1)):
        return close.replace("mean ", f"mean --{section}.")
    fields = getattr(default, section or unknown, None)
    if dataclasses.is_dataclass(fields):
        return f"; {section or unknown} has {', '.join(field.name for field in dataclasses.fields(fields))}"
    return alike(unknown, known, 1).replace("mean ", "mean --")


def _wrong(name: str, option: Option, values: list[str]) -> str | None:
    """What is wrong with the values of an option, and what it takes."""
    if name == POSITIONAL and option == NOTHING:
        return f"unexpected argument {shown(values[0])}" if values else None
    if option.amount is not None and len(values) != option.amount:
        takes = {0: "no value", 1: "one value"}.get(option.amount, f"{option.amount} values")
        return f"{name} takes {takes}, {f'not {len(values)}: {shown(values)}' if values else 'but none was given'}"
    if (option.optional and values == ["None"]) or all(_fits(value, option.kinds) for value in values):
        return None
    several = option.amount is None or option.amount > 1
    given = repr(values if several else values[0])
    given = given if len(given) <= LONGEST else "too long a text"
    wanted = " or ".join(map(_wanted, option.kinds))
    return f"{name or 'the argument'} is {given} but must be {'a list, each ' if several else ''}{wanted}"


def _fits(text: str, kinds: tuple[Any, ...]) -> bool:
    return any(_is_of(text, kind) for kind in kinds)


def _is_of(text: str, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return text in get_args(kind)
    if kind is bool:
        return text in ("True", "False")
    try:
        number = kind(text) if kind in (int, float) else 0
    except ValueError:
        return False
    return number not in (math.inf, -math.inf) or "inf" in text.lower()  # so many digits that they overflow


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {int: "a whole number", float: "a number", bool: "true or false"}[kind]
