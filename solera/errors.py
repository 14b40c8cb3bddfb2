"""The one exception a user is meant to see: what was wrong, where, and what to do, in one line; and words for it."""

from typing import Any


class SoleraError(Exception):
    """A mistake in what the user gave us. The command line prints it as one line and exits with status 2."""


class StopRunError(SoleraError):
    """Stops the run, whatever `collect.errors` says about episodes that fail."""


class BadRequestError(SoleraError):
    """A request that an engine cannot serve. It fails alone; other requests of its batch do not."""


def one_line(said: object, longest: int = 300) -> str:
    """What another package's error says, or any text, without its line breaks."""
    return " ".join(str(said).split())[:longest] or type(said).__name__


def counted(count: int, noun: str) -> str:
    """How many of something.

    >>> counted(1, "reward"), counted(0, "bad line")
    ('1 reward', '0 bad lines')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def kind_of(value: Any) -> str:
    """What a value of JSON is."""
    kinds = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
