"""What a user's code gives, checked and brought into one form; anything else is refused in one line."""

from inspect import iscoroutine
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from solera.errors import SoleraError, one_line


def kind(value: Any) -> str:
    """What a value is, for a complaint about it."""
    return "text" if isinstance(value, str) else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """What a value is and how it begins, for a complaint about it."""
    return f"{kind(value)}: {one_line(repr(value), 60)}"


def is_token_ids(token_ids: Any) -> bool:
    """Whether it is a tuple of whole numbers already."""
    return type(token_ids) is tuple and set(map(type, token_ids)) <= {int}


def token_ids_of(value: Any, what: str) -> tuple[int, ...]:
    """Token ids as a tuple, from a tuple, a list or an array; a complaint about anything else begins with `what`.

    >>> token_ids_of([3, 4], "the prompt")
    (3, 4)
    """
    if is_token_ids(value):
        return value
    if isinstance(value, str):
        raise SoleraError(f"{what} is text; it must be token ids: encode it first, with codec.encode(text)")
    if iscoroutine(value):
        value.close()  # or Python would print that nobody awaited it
        raise SoleraError(f"{what} is a coroutine: write `await generate(...)`")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, another device's tensor
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SoleraError(f"{what} must be token ids, a tuple or list of whole numbers; it is {shown(value)}")
    return tuple(map(int, array.tolist()))


def tokens_written(versions: Any) -> int:
    """Tokens in all runs of `Completion.versions`."""
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
    """Log-probabilities as an array, from any list of numbers."""
    try:
        logp_T: npt.NDArray[np.float32] = np.asarray(value, np.float32)
    except (TypeError, ValueError, RuntimeError):
        logp_T = np.zeros((), np.float32)
    if logp_T.ndim != 1:
        raise SoleraError(f"completion: behaviour_logp_T must be a list of numbers, not {kind(value)}")
    return logp_T
