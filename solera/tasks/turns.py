"""The arguments that a task may pass for one turn: length, stop strings, temperature."""

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real

from solera.config.rules import COLDEST
from solera.errors import SoleraError
from solera.records import Sampling
from solera.values import kind


def turn_sampling(
    sampling: Sampling,
    max_tokens: int | None,
    stop: str | Sequence[str],
    temperature: float | None,
    room: int | None = None,
) -> Sampling:
    """The run's sampling settings, with the task's arguments for this turn applied.

    >>> turn_sampling(Sampling(1.0, 64), 8, "END", None)
    Sampling(temperature=1.0, max_tokens=8, top_p=1.0, stop=('END',))
    """
    if max_tokens is None and temperature is None and room is None and stop == ():
        return sampling
    most = sampling.max_tokens if max_tokens is None else _whole(max_tokens, "max_tokens")
    return replace(
        sampling,
        max_tokens=most if room is None else min(most, _whole(room, "room")),
        stop=_stop(stop),
        temperature=sampling.temperature if temperature is None else _temperature(temperature),
    )


def _whole(given: int, name: str) -> int:
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise SoleraError(f"generate: {name} must be a whole number, not {kind(given)}")
    if given < 1:
        raise SoleraError(f"generate: {name} is {given}; it must be at least 1")
    return int(given)


def _stop(given: str | Sequence[str]) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise SoleraError("generate: stop must be a text or a list of texts")
    if not all(texts):
        raise SoleraError("generate: a text in stop is empty, and every completion would end at once: leave it out")
    return tuple(texts)


def _temperature(given: float) -> float:
    if isinstance(given, bool) or not isinstance(given, Real):
        raise SoleraError(f"generate: temperature must be a number, not {kind(given)}")
    if given != 0 and not COLDEST <= given < math.inf:
        raise SoleraError(f"generate: temperature is {given}; it must be 0, or {COLDEST} or more")
    return float(given)
