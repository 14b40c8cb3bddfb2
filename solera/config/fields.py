"""One field of a section: its type and limits, its option, its help text."""

import ast
import difflib
import inspect
import itertools
import sys
import types
from functools import cache
from itertools import cycle
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import tyro

from solera.config.secrets import MAY_HOLD_SECRETS
from solera.errors import SoleraError

Text = NewType("Text", str)
"""Text that may have several lines."""

LARGEST = 10**18 - 1
"""Largest whole number. Larger ones, or sums with them, do not fit into 64 bits."""


LARGEST_REWARD = 1e12
"""Largest absolute value of a reward. Squares and sums of such rewards are finite in float32."""


@cache
def hints_of(section: type) -> dict[str, Any]:
    """The annotated types of a section's fields. Evaluating them takes longer than checking the values."""
    return get_type_hints(section)


def short(section: str, field_name: str) -> Any:
    """A field whose option is also its section's name: `--model X` for `--model.path X`."""
    return tyro.conf.arg(name=section, prefix_name=False, aliases=(f"--{section}.{field_name}",))


def check_types(values: Any, name: str, section: Any) -> None:
    """Check values given from Python against the same types as in a file."""
    if not isinstance(values, section):
        raise SoleraError(f"{name} is {values!r} but must be a solera.{section.__name__}")
    for key, hint in hints_of(section).items():
        value = getattr(values, key)
        try:
            if value is not None or type(None) not in get_args(hint):
                typed(list(value) if isinstance(value, tuple) else value, hint)
        except TypeError as error:
            raise SoleraError(f"{name}.{key} is {shown_in(f'{name}.{key}', value)} but must be {error}") from error


def typed(value: Any, hint: Any) -> Any:
    """The value converted to the annotated type. Raises TypeError with a description of the type if it does not fit."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return typed(value, arguments[0])
    if origin in (Union, types.UnionType):
        return _typed_one_of(value, [a for a in arguments if a is not type(None)])
    if origin is Literal:
        if value not in arguments:
            raise TypeError("one of " + ", ".join(map(str, arguments)))
        return value
    if origin is tuple:
        return _typed_items(value, arguments)
    if hint is Text:
        return value if isinstance(value, str) and "\n" in value else typed(value, str)
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise TypeError({int: "a whole number", float: "a number", str: "text", bool: "true or false"}[hint])
    if hint is int and abs(value) > LARGEST:
        raise TypeError("a whole number of at most 18 digits")
    if hint is float and not abs(value) <= sys.float_info.max:  # also true for NaN
        raise TypeError("a finite number")
    if hint is str and not (value and value.isprintable()):
        raise TypeError("text, not empty and without control characters")
    return float(value) if hint is float else value


def _typed_one_of(value: Any, hints: list[Any]) -> Any:
    wanted = []
    for hint in hints:
        try:
            return typed(value, hint)
        except TypeError as error:
            wanted.append(str(error))
    raise TypeError(" or ".join(wanted))


def _typed_items(value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    """Items of a tuple, of fixed length or of any number of one kind."""
    kind, any_number = {str: "texts", float: "numbers"}[hints[0]], hints[1] is Ellipsis
    if not isinstance(value, list) or not (any_number or len(value) == len(hints)):
        raise TypeError(f"a list of {kind}" if any_number else f"a list of {len(hints)} {kind}")
    return tuple(typed(item, hints[0] if any_number else hint) for item, hint in zip(value, cycle(hints), strict=False))


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number with thousands of digits
        return "too long a number"
    return text if len(text) <= 100 else f"{text[:100]}..."


def shown_in(field: str, value: Any) -> str:
    """The value of a field for a message, unless it may contain a secret."""
    return "not shown" if field in MAY_HOLD_SECRETS else shown(value)


SYNONYMS = {
    "learning_rate": "lr", "lr_scheduler_type": "decay", "warmup_steps": "warmup", "max_grad_norm": "grad_clip",
    "num_iterations": "passes", "num_generations": "group_size", "max_steps": "steps", "total_training_steps": "steps",
    "max_completion_length": "max_tokens", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""Names of our fields in other trainers."""


def perhaps(word: str, known: Any) -> str:
    """A suggestion for an unknown word, or all known words if none is similar."""
    return alike(word, known, 1) or f"; use one of {', '.join(known)}"


def alike(word: str, known: Any, most: int = 3) -> str:
    """A suggestion for an unknown word; empty if no known word is similar.

    >>> alike("epsilon", ["epsilon_low", "epsilon_high", "beta"])
    '; did you mean epsilon_low or epsilon_high?'
    >>> alike("learning_rate", ["lr", "warmup"])
    '; did you mean lr?'
    """
    if SYNONYMS.get(word) in known:
        return f"; did you mean {SYNONYMS[word]}?"
    close = difflib.get_close_matches(word, list(known), most)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def help_of(section: type) -> dict[str, str]:
    """The string under each field of a config class.

    >>> from solera.config import LearnConfig
    >>> help_of(LearnConfig)["passes"]
    'Passes over each batch (i in the papers).'
    """
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    explained = {}
    for field_node, text_node in itertools.pairwise(definition.body):
        if isinstance(field_node, ast.AnnAssign) and isinstance(text_node, ast.Expr):
            assert isinstance(field_node.target, ast.Name) and isinstance(text_node.value, ast.Constant)
            explained[field_node.target.id] = " ".join(str(text_node.value.value).split())
    return explained
