"""Check and convert values that a user's code provides. Anything else is refused in one line."""

from inspect import iscoroutine
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from solera.errors import SoleraError, one_line


def kind(value: Any) -> str:
    """The kind of a value, for an error message."""
    return "text" if isinstance(value, str) else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """The kind of a value and how it starts, for an error message."""
    return f"{kind(value)}: {one_line(repr(value), 60)}"


def whole_characters(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair. No tokenizer can encode such a half.

    >>> whole_characters("a" + chr(0xD83D))
    'a?'
    """
    return text.encode("utf-8", "replace").decode()


def is_token_ids(token_ids: Any) -> bool:
    """Whether it is already a tuple of whole numbers."""
    return type(token_ids) is tuple and set(map(type, token_ids)) <= {int}


def token_ids_of(value: Any, what: str) -> tuple[int, ...]:
    """Convert a tuple, list or array to a tuple of token ids. `what` starts the error message about anything else.

    >>> token_ids_of([3, 4], "the prompt")
    (3, 4)
    """
    if is_token_ids(value):
        return value
    if isinstance(value, str):
        raise SoleraError(f"{what} is text; it must be token ids: encode it first, with codec.encode(text)")
    if iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        raise SoleraError(f"{what} is a coroutine: write `await generate(...)`")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, another device's tensor
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SoleraError(f"{what} must be token ids, a tuple or list of whole numbers; it is {shown(value)}")
    return tuple(map(int, array.tolist()))


def tokens_written(versions: Any) -> int:
    """Number of tokens in `Completion.versions`."""
    total = 0
    try:
        for count, version in versions:
            if index(count) < 0:
                raise TypeError
            total += count
            index(version)
    except (TypeError, ValueError):
        raise SoleraError(f"completion: versions must be pairs of (tokens, version), not {versions!r}") from None
    return total


def logp_of(value: Any) -> npt.NDArray[np.float32]:
    """Convert a list of numbers to an array of log-probabilities."""
    try:
        logp_T: npt.NDArray[np.float32] = np.asarray(value, np.float32)
    except (TypeError, ValueError, RuntimeError):
        logp_T = np.zeros((), np.float32)
    if logp_T.ndim != 1:
        raise SoleraError(f"completion: behaviour_logp_T must be a list of numbers, not {kind(value)}")
    return logp_T
