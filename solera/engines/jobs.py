"""The input and output of a decoder: texts to continue, and the tokens generated after them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from solera.records import Sampling

Spell = Callable[[npt.NDArray[np.int32]], str]
"""Converts tokens to text, which is searched for stop strings."""
FEW = 8
"""Most tokens of a short request. Short ones go first, because the proof of a sync is one."""
Kind = tuple[float, float]
"""Temperature and top_p. Jobs of one kind are sampled in one operation."""


@dataclass(eq=False)
class Job:
    """A text to continue. Its random numbers depend only on its own seed."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    limit: int
    """Maximum number of tokens: `sampling.max_tokens`, or less if the model's context ends earlier."""
    cancelled: bool = False
    """Set when the request is cancelled. `Decoder.drop_cancelled` then drops the job."""
    earlier: list[tuple[int, int]] = field(default_factory=list)
    """If the weights changed while the job was under way: (number of tokens written until then, their version)."""

    def versions(self, length: int, version: int) -> tuple[tuple[int, int], ...]:
        """Run-length list of the versions that wrote the job's `length` tokens. `version` wrote the last ones.

        >>> job = Job((5,), Sampling(1.0, 9), seed=0, limit=9)
        >>> job.earlier += [(3, 0), (5, 1)]
        >>> job.versions(7, 2), job.versions(5, 2), job.versions(2, 2)
        (((3, 0), (2, 1), (2, 2)), ((3, 0), (2, 1)), ((2, 0),))
        """
        if length and not self.earlier:
            return ((length, version),)
        ends, start = dict[int, int](), 0  # a version that is sent again after a fault has one span
        for end, by in (*self.earlier, (length, version)):
            if min(end, length) > start:
                start = ends[by] = min(end, length)
        starts = (0, *ends.values())
        return tuple((end - before, by) for (by, end), before in zip(ends.items(), starts, strict=False))

    @property
    def kind(self) -> Kind:
        return self.sampling.temperature, self.sampling.top_p


class Written(NamedTuple):
    """The tokens generated for a job. `stopped` is False if it was cut off at its limit."""

    job: Job
    token_ids_T: npt.NDArray[np.int32]
    logp_T: npt.NDArray[np.float32]
    stopped: bool


class Decoder(Protocol):
    """Decodes many jobs at once. Only one thread uses it."""

    prefilled: int
    """Prompt tokens computed so far."""

    sampled: int
    """Tokens sampled so far, whatever became of them."""

    @property
    def busy(self) -> bool:
        """Whether jobs are in progress."""
        ...

    def admit(self, jobs: list[Job]) -> int:
        """Begin with all of these jobs if they fit beside those under way, else with none. With nothing under way,
        begin with as many as fit, at least one. Returns how many were begun, counted from the first."""
        ...

    def advance(self) -> list[Written]:
        """Write one or more tokens for every job under way. Returns the jobs that have ended."""
        ...

    def drop_cancelled(self) -> None:
        """Stop writing for jobs that were cancelled."""
        ...

    def recompute(self) -> dict[Job, int]:
        """Compute the key-value cache of every job again, because the weights have changed. Returns how many tokens the
        previous weights wrote for each job."""
        ...

    def reset(self) -> None:
        """Drop all jobs."""
        ...

    def free(self) -> None:
        """Drop all jobs, and give up the memory of keys and values."""
        ...


def reach(stop: tuple[str, ...]) -> int:
    """Tokens that a stop string may have: each spells at least a byte, but a few may spell nothing."""
    return max(len(text.encode()) for text in stop) + 8


def stop_at(token_ids_T: npt.NDArray[np.int32], known: int, stop: tuple[str, ...], spell: Spell) -> int | None:
    """Number of tokens up to and including the one that completes a stop string; `None` if there is none yet. The
    first `known` tokens were looked at before.

    >>> letters = lambda ids: "".join(map(chr, ids))
    >>> stop_at(np.array([104, 105, 10, 10, 98], np.int32), 0, ("\\n\\n",), letters)
    4
    """
    longest = reach(stop)
    whole = spell(token_ids_T[max(0, known + 1 - longest) :])
    if not any(text in whole for text in stop):
        return None  # token by token only if there is one
    for end in range(known + 1, len(token_ids_T) + 1):
        tail = spell(token_ids_T[max(0, end - longest) : end])
        if any(text in tail for text in stop):
            return end
    return None
