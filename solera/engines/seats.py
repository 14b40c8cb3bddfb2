"""Who sits in which slot of continuous decoding. What the host must know of every row between two chunks of tokens is
in arrays: loops over a thousand rows would take as long as the GPU takes for a chunk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from solera.engines.jobs import Job
from solera.engines.prompts import Prefix

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(eq=False)
class Seat:
    """A job with the line of memory that its tokens go to, and its pages."""

    job: Job
    request: int
    prefix: Prefix
    pages: list[int] = field(default_factory=list)
    """Pages of the response. None while it waits."""
    counted: int = 0
    """Tokens sampled for it that were counted until it left its slot."""


class Seats:
    """The slots. Arrays have one number for each; those of free slots mean nothing."""

    def __init__(self, slots: int) -> None:
        self._seats: list[Seat | None] = [None] * slots
        self.taken_S: Mask
        self.stops_S: Mask
        self.taken_S, self.stops_S = np.zeros((2, slots), np.bool_)
        """Whether somebody has it, and whether stop strings may end that response."""
        self.began_S, self.limit_S, self.pages_S, self.counted_S, self.chunk_S = np.zeros((5, slots), np.int64)
        """When it got its slot, in tokens that every row has been given since the first. Most tokens of its response,
        pages of the response, and tokens that were counted. The last chunk before it got its slot: flags of that chunk
        or an earlier one tell of the job before."""

    def __getitem__(self, slot: int) -> Seat | None:
        return self._seats[slot]

    def __iter__(self) -> Iterator[tuple[int, Seat]]:
        return ((slot, seat) for slot, seat in enumerate(self._seats) if seat is not None)

    def with_stops(self) -> list[tuple[int, Seat]]:
        """Those that stop strings may end."""
        slots = np.flatnonzero(self.taken_S & self.stops_S).tolist()
        return [(slot, seat) for slot in slots if (seat := self._seats[slot]) is not None]

    @property
    def taken(self) -> int:
        return int(np.count_nonzero(self.taken_S))

    def free(self, rows: int) -> list[int]:
        """Slots among the first `rows` that nobody has."""
        return np.flatnonzero(~self.taken_S[:rows]).tolist()

    def put(self, slots: Sequence[int], seats: Sequence[Seat], now: int, chunk: int) -> None:
        """New rows. They have no pages."""
        for slot, seat in zip(slots, seats, strict=True):
            self._seats[slot] = seat
        where = list(slots)
        self.taken_S[where], self.began_S[where], self.chunk_S[where] = True, now, chunk
        self.stops_S[where] = [bool(seat.job.sampling.stop) for seat in seats]
        self.limit_S[where] = [seat.job.limit for seat in seats]
        self.pages_S[where] = self.counted_S[where] = 0

    def remove(self, slots: Sequence[int]) -> list[Seat]:
        """Returns who sat there."""
        gone = list[Seat]()
        for slot in slots:
            seat = self._seats[slot]
            if seat is not None:
                seat.counted, self._seats[slot] = int(self.counted_S[slot]), None
                gone.append(seat)
        self.taken_S[list(slots)] = False
        return gone

    def reorder(self, order: Sequence[int]) -> None:
        """Slot n gets what slot `order[n]` has."""
        self._seats[: len(order)] = [self._seats[slot] for slot in order]
        numbers = self.began_S, self.limit_S, self.pages_S, self.counted_S, self.chunk_S
        for array in (self.taken_S, self.stops_S, *numbers):
            array[: len(order)] = array[list(order)]

    def tokens_S(self, now: int) -> Numbers:
        """Tokens of each response at that time, if it has not ended before."""
        return np.where(self.taken_S, np.minimum(now - self.began_S, self.limit_S), 0)

    def newest(self) -> int:
        """The slot that was taken last."""
        slots = np.flatnonzero(self.taken_S)
        return int(slots[np.lexsort((slots, self.began_S[slots]))[-1]])

    def count(self, tokens_S: Numbers, known_S: Mask) -> int:
        """These tokens were sampled for the first rows so far, where `known_S`. Returns how many are new."""
        rows = len(tokens_S)
        new_S = np.where(known_S, np.maximum(tokens_S - self.counted_S[:rows], 0), 0)
        self.counted_S[:rows] += new_S
        return int(new_S.sum())
