"""Read and write TOML. Errors name the file, the line and the field. A written config can be read back."""

import dataclasses
import itertools
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from solera.config.fields import SYNONYMS, hints_of, perhaps, shown_in, typed
from solera.config.sections import Config
from solera.errors import SoleraError

Place = Callable[..., str]
"""Maps the path of a table or field to its location, such as `run.toml:12`."""
KEY = r"""(?:"[^"]*"|'[^']*'|[\w-]+)"""
DOTTED = rf"{KEY}(?:\s*\.\s*{KEY})*"
"""A key as TOML writes it: `period`, `sync.period`, `"v=20".sync`."""
UNSET = "unset"


def load(path: Path | str) -> Config:
    """Read a TOML file. Unknown keys and wrong types are refused with file, line and field."""
    text, tables = read_toml(Path(path))
    return overlay(Config(), tables, places(text, str(path)))


def load_resolved(path: Path) -> Config:
    """Read the config.toml that a run wrote. Fields that did not exist then get the value that the code used then.

    A run writes every field, set or unset. So a field that the file does not mention did not exist yet.
    """
    config = load(path)
    if config.objective.advantage == "whiten" and "whiten_epsilon" not in _text(path):
        return override(config, "objective", whiten_epsilon=1e-4)
    return config


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SoleraError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SoleraError(f"{path}:{line}: cannot be read: not UTF-8 text") from error


def located(error: SoleraError, file: Path, config: Config) -> SoleraError:
    """The error with file and line, if the field that it starts with got its value from `file`."""
    named = re.match(r"(\w+)\.(\w+)\b", str(error))
    if named is None:
        return error
    section, key = named.groups()
    text = _text(file)
    if key not in tomllib.loads(text).get(section, {}):
        return error
    if getattr(getattr(load(file), section), key) != getattr(getattr(config, section), key):  # an option replaced it
        return error
    return SoleraError(f"{file}:{_line(text, (section, key))}: {error}")


def parse(text: str, source: str) -> Config:
    """Read a Config from TOML text. `source` names the text in errors."""
    return overlay(Config(), tomllib.loads(text), places(text, source))


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file and its tables."""
    text = _text(path)
    try:
        return text, tomllib.loads(text)
    except RecursionError as error:
        raise SoleraError(f"{path}: not valid TOML: lists or tables are nested too deep") from error
    except ValueError as error:  # TOMLDecodeError, or Python's error for a number with thousands of digits
        raise SoleraError(f"{path}: not valid TOML: {error}") from error


def places(text: str, source: str) -> Place:
    """Return a function that finds the line of a table or field in a TOML text."""
    return lambda *path: f"{source}:{_line(text, path)}"


def overlay(config: Config, tables: dict[str, Any], place: Place) -> Config:
    """Apply the fields of TOML tables to a config. `place(section, field)` gives the location of each."""
    sections = hints_of(Config)
    values = {}
    for name, table in tables.items():
        if name not in sections:
            ours = SYNONYMS.get(name, name)
            homes = [f"[{section}]" for section, hint in sections.items() if ours in hints_of(hint)]
            if homes and not isinstance(table, dict):
                called = "put it" if ours == name else f"Solera calls it {ours}: put it"
                raise SoleraError(f"{place(name)}: {name} is outside any table; {called} under {' or '.join(homes)}")
            raise SoleraError(f"{place(name)}: unknown table [{name}]{perhaps(name, sections)}")
        if not isinstance(table, dict):
            raise SoleraError(f"{place(name)}: {name} is a table: write [{name}] and its fields below")
        values[name] = dataclasses.replace(getattr(config, name), **typed_fields(sections[name], name, table, place))
    return dataclasses.replace(config, **values)


def typed_fields(section: Any, name: str, table: dict[str, Any], place: Place) -> dict[str, Any]:
    """The fields of one table, checked against the fields and types of the class `section`."""
    hints = hints_of(section)
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise SoleraError(f"{place(name, key)}: unknown field {name}.{key}{perhaps(key, hints)}")
        try:
            values[key] = typed(value, hints[key])
        except TypeError as error:
            said = f"{name}.{key} is {shown_in(f'{name}.{key}', value)} but must be {error}"
            raise SoleraError(f"{place(name, key)}: {said}") from error
    return values


def _line(text: str, path: tuple[str, ...]) -> int:
    """The line of a key, or of the innermost table around it that has its own line."""
    best, found, table = 0, 1, tuple[str, ...]()
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(rf"\s*\[{{1,2}}\s*({DOTTED})\s*\]", line):
            here = table = _keys(header[1])
        elif assignment := re.match(rf"\s*({DOTTED})\s*=", line):
            here = (*table, *_keys(assignment[1]))
        else:
            continue
        common = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, here, path)))
        if common > best:
            best, found = common, number
    return found


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in re.findall(KEY, dotted))


def dump(config: Config) -> str:
    """The config as TOML that `parse` can read. Unset fields appear as comments, so that the file is complete."""
    lines = []
    for section, fields in itertools.groupby(fields_of(config).items(), lambda field: field[0].partition(".")[0]):
        lines.append(f"[{section}]")
        for name, value in fields:
            key = name.partition(".")[2]
            lines.append(f"# {key} is {UNSET}" if value == UNSET else f"{key} = {value}")
        lines.append("")
    return "\n".join(lines)


def fields_of(config: Config) -> dict[str, str]:
    """Every field as TOML writes it, section by section.

    >>> fields_of(Config())["learn.warmup"], fields_of(Config())["run.name"]
    ('10', 'unset')
    """
    sections = {section.name: getattr(config, section.name) for section in dataclasses.fields(config)}
    return {
        f"{name}.{key.name}": UNSET if (value := getattr(section, key.name)) is None else _toml(value)
        for name, section in sections.items()
        for key in dataclasses.fields(section)
    }


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML allows it only as an escape


def with_settings(config: Config, settings: Iterable[str], option: str) -> Config:
    """Apply settings such as `learn.lr=1e-4`. A value that is not TOML is a text. `option` names them in errors.

    >>> config = with_settings(Config(), ["sync.in_flight=drain", "sync.period=2"], "--settings")
    >>> config.sync.in_flight, config.sync.period
    ('drain', 2)
    """
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(DOTTED, key.strip()):
            raise SoleraError(f"{option} {setting}: must be KEY=VALUE, such as sync.period=2")
        try:
            tables = tomllib.loads(setting)
        except ValueError:
            tables = tomllib.loads(f"{key} = {_toml(value.strip())}")
        config = overlay(config, tables, lambda *_, here=f"{option} {setting}": here)
    return config


def override(config: Config, section: str, **values: Any) -> Config:
    """A copy with some fields of one section replaced.

    >>> override(Config(), "run", steps=5).run.steps
    5
    """
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
