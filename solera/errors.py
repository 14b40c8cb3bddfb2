"""The exceptions that users see, each with a one-line message: what is wrong, where, and what to do. Also helpers for
such messages."""

from typing import Any


class SoleraError(Exception):
    """A mistake in the user's input. The command line prints it as one line and exits with status 2."""


class StopRunError(SoleraError):
    """Stops the run even if `collect.errors` tolerates failed episodes."""


class BadRequestError(SoleraError):
    """A request that an engine cannot serve. Other requests of the same batch are not affected."""


def one_line(said: object, longest: int = 300) -> str:
    """The message of another package's error, or any text, without line breaks."""
    return " ".join(str(said).split())[:longest] or type(said).__name__


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "reward"), counted(0, "bad line")
    ('1 reward', '0 bad lines')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def kind_of(value: Any) -> str:
    """The name of a JSON value's type."""
    kinds = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
