"""The JSON schema of a Python function, from its type hints and its docstring, in the form that chat templates take."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from solera.errors import SoleraError

_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^(\s+)(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def schema_of(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """The schema of a tool. Every parameter needs a type hint. The docstring describes the function and, under `Args:`,
    its parameters.

    >>> def double(number: int) -> int:
    ...     '''Double a number.
    ...
    ...     Args:
    ...         number: The number.
    ...     '''
    >>> schema_of(double)["function"]["parameters"]["properties"]
    {'number': {'type': 'integer', 'description': 'The number.'}}
    """
    name = name or getattr(function, "__name__", type(function).__name__)
    text = inspect.getdoc(function) or ""
    if not text.strip():
        raise SoleraError(f"tool {name} has no docstring: write one line that tells the model what it does")
    described, required, properties = _described(text), list[str](), dict[str, Any]()
    hints = _hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise SoleraError(f"tool {name}: parameter {parameter} cannot be given by name: write it out")
        if parameter.name not in hints:
            raise SoleraError(f"tool {name}: parameter {parameter.name} has no type hint")
        kind = _kind(hints[parameter.name], f"tool {name}: parameter {parameter.name}")
        properties[parameter.name] = kind | (
            {"description": described[parameter.name]} if parameter.name in described else {}
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    about = " ".join(_SECTION.split(text)[0].split())
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(called)
    except Exception:  # a hint that names something unknown; the plain annotations may do
        return dict(getattr(called, "__annotations__", {}))


def _kind(hint: Any, what: str) -> dict[str, Any]:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Annotated:
        return _kind(inside[0], what)
    if origin is Literal:
        return _choices(inside)
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _choices(tuple(member.value for member in hint))
    return _union(inside, what) if origin in (Union, types.UnionType) else _plain(hint, what)


def _union(inside: tuple[Any, ...], what: str) -> dict[str, Any]:
    kinds = [_kind(each, what) for each in inside if each is not type(None)]
    nullable = {"nullable": True} if type(None) in inside else {}
    if len(kinds) == 1:
        return kinds[0] | nullable
    names = [kind.get("type") for kind in kinds if set(kind) == {"type"}]
    return ({"type": names} if len(names) == len(kinds) else {"anyOf": kinds}) | nullable


def _plain(hint: Any, what: str) -> dict[str, Any]:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if (base := _TYPES.get(origin or hint)) is None:
        raise SoleraError(f"{what} has the type hint {hint}; a tool takes str, int, float, bool, list, dict or Literal")
    if base == "array" and inside:
        return {"type": base, "items": _kind(inside[0], what)}
    if base == "object" and len(inside) == 2:
        return {"type": base, "additionalProperties": _kind(inside[1], what)}
    return {"type": base}


def _choices(values: tuple[Any, ...]) -> dict[str, Any]:
    kinds = {_TYPES.get(type(value)) for value in values}
    return ({"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}) | {"enum": list(values)}


def _described(text: str) -> dict[str, str]:
    """The descriptions under `Args:`, as Google's style has them."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    body = next((sections[title] for title in ("Args", "Arguments", "Parameters") if title in sections), "")
    found, name, indent = dict[str, list[str]](), None, None
    for line in body.splitlines():
        entry = _ENTRY.match(line)
        if entry and (indent is None or len(entry[1]) <= indent):
            indent, name = len(entry[1]), entry[2]
            found[name] = [entry[3]]
        elif name is not None and line.strip():
            found[name].append(line)
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}
