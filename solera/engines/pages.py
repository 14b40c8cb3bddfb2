"""Pages of keys and values: memory that follows the responses as they grow, at addresses that a CUDA graph can use.

Torch gives memory in *segments*, each for a number of pages and for all layers. A page's number is its distance from
the first page, counted in pages of one layer, whichever segment it lies in. So a kernel knows only where the first
segment is, and reaches every other one through the numbers in its table of pages.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from solera.models.language_model import LanguageModel

PAGE = 128
"""Tokens of a page."""
SEGMENT = 2**28
"""Bytes of a segment at most. Torch takes a while to get memory from the GPU."""
NOBODY = 0
"""The page of rows that have ended. They go on writing until another row takes their place."""


def bytes_per_token(model: LanguageModel) -> int:
    """Bytes of the keys and values of one token. Every layer gets as much as the largest."""
    return 2 * len(model.key_value_shapes) * _width(model) * model.key_value_dtype.itemsize


def _width(model: LanguageModel) -> int:
    return max(heads * dim for heads, dim in model.key_value_shapes)


@dataclass(eq=False)
class Segment:
    memory: Tensor
    pages: range
    free: int


class Pages:
    """The pages of one engine, for up to `room` tokens. Empty segments are given back to torch unless they are `kept`:
    a learner that works beside the engine should find the same free memory every time. `in_one` piece, torch's own
    operations can index all segments: a CPU takes memory only when it is first written to."""

    def __init__(self, model: LanguageModel, room: int, kept: bool = False, in_one: bool = True) -> None:
        self.tokens = PAGE
        self.kept = kept
        self.floor = 0
        """Pages that are not given back while responses are under way, so that one of them can always go on."""
        self._dtype, self._device = model.key_value_dtype, model.device
        self._unit = PAGE * _width(model)
        """Numbers in a page of one layer's keys."""
        slabs = 2 * len(model.key_value_shapes)
        bytes_per_page = slabs * self._unit * self._dtype.itemsize
        self._at_once = max(2, min(SEGMENT // bytes_per_page, room // PAGE // 16))
        """Pages of a segment."""
        self._segments = list[Segment]()
        self.allow(room)
        self._numbers = slabs * self._at_once * self._unit
        count = max(1, (self.most + 1) // self._at_once)
        self._whole = self._empty(count * self._numbers) if in_one else None
        self._segment_of = dict[int, Segment]()
        self._free = list[int]()
        """A heap. Pages with low numbers are taken first, so that other segments become empty."""
        self._add(self._empty(self._numbers) if self._whole is None else self._whole[: self._numbers])
        self.pools = [
            (self._slab(2 * layer, *shape), self._slab(2 * layer + 1, *shape))
            for layer, shape in enumerate(model.key_value_shapes)
        ]
        """Keys and values of each layer, `[pages, tokens, heads, dim]`: of all segments, or of the first one."""
        for key, value in self.pools:
            key[NOBODY], value[NOBODY] = 0.0, 0.0

    def allow(self, room: int) -> None:
        """Have pages for no more than so many tokens from now on. Pages that are kept may be used, even if a learner
        has just taken all other memory."""
        most = (room // self.tokens + 1) // self._at_once * self._at_once - 1
        self.most = max(most, self.total) if self.kept else most
        """Pages that there can be: whole segments, less one page that is nobody's."""

    @property
    def total(self) -> int:
        """Pages in memory, free or not."""
        return len(self._segments) * self._at_once - 1

    @property
    def nbytes(self) -> int:
        return sum(segment.memory.nbytes for segment in self._segments)

    @property
    def taken(self) -> int:
        return self.total - len(self._free)

    def count(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.tokens)

    def reserve(self, pages: int) -> bool:
        """Have so many pages in memory as long as responses are under way, if there is room."""
        while self.total < pages:
            if not self._grow():
                return False
        self.floor = max(self.floor, pages)
        return True

    def can_take(self, count: int) -> bool:
        """Whether so many pages are free. Gets memory for them if there is room."""
        while len(self._free) < count:
            if not self._grow():
                return False
        return True

    def take(self, count: int) -> list[int]:
        assert self.can_take(count), "asked without looking for room"
        taken = [heappop(self._free) for _ in range(count)]
        for page in taken:
            self._segment_of[page].free -= 1
        return taken

    def give(self, pages: list[int]) -> None:
        for page in pages:
            self._segment_of[page].free += 1
            heappush(self._free, page)
        if pages and not self.kept:
            self.shrink()

    def reset(self) -> None:
        """Nobody uses any page."""
        self.floor = 0
        for segment in self._segments:
            segment.free = len(segment.pages) - (NOBODY in segment.pages)
        self._free = sorted(page for page in self._segment_of if page != NOBODY)
        if not self.kept:
            self.shrink()

    def _grow(self) -> bool:
        """Get another segment. Refused by torch, no more is asked for until the next batch."""
        if self.total + self._at_once > self.most:
            return False
        if self._whole is not None:
            used = {segment.pages.start for segment in self._segments}
            parts = self._whole.split(self._numbers)
            part = next((part for part in parts if self._number(part) not in used), None)
            if part is not None:
                self._add(part)
            return part is not None
        try:
            memory = self._empty(self._numbers + self._unit)
        except torch.OutOfMemoryError:
            self.most = self.total
            return False
        distance = (memory.data_ptr() - self._segments[0].memory.data_ptr()) // memory.itemsize
        skipped = -distance % self._unit
        self._add(memory[skipped : skipped + self._numbers])
        return True

    def _add(self, memory: Tensor) -> None:
        first = self._number(memory)
        segment = Segment(memory, range(first, first + self._at_once), self._at_once)
        self._segments.append(segment)
        self._segment_of |= dict.fromkeys(segment.pages, segment)
        self._free += segment.pages
        if NOBODY in segment.pages:
            self._free.remove(NOBODY)
            segment.free -= 1
        heapify(self._free)

    def _number(self, memory: Tensor) -> int:
        """The number of a segment's first page."""
        if not self._segments:
            return NOBODY
        return (memory.data_ptr() - self._segments[0].memory.data_ptr()) // (self._unit * memory.itemsize)

    def shrink(self) -> None:
        """Give empty segments back to torch, the newest first. The first one of all stays."""
        first, *others = self._segments
        spare = (self.total - self.floor) // self._at_once
        empty = [segment for segment in reversed(others) if segment.free == len(segment.pages)][: max(0, spare)]
        if not empty:
            return
        self._segments = [first, *(segment for segment in others if segment not in empty)]
        for segment in empty:
            for page in segment.pages:
                del self._segment_of[page]
        self._free = [page for page in self._free if page in self._segment_of]
        heapify(self._free)

    def _empty(self, numbers: int) -> Tensor:
        return torch.empty(numbers, dtype=self._dtype, device=self._device)

    def _slab(self, number: int, heads: int, dim: int) -> Tensor:
        """The keys or values of a layer."""
        memory = self._segments[0].memory if self._whole is None else self._whole
        start = number * self._at_once * self._unit
        pages = (len(memory) - start - self._unit) // self._unit + 1 if self._whole is not None else self._at_once
        slab = memory.as_strided(
            (pages, self.tokens, heads, dim), (self._unit, heads * dim, dim, 1), memory.storage_offset() + start
        )
        # As a tensor of its own: torch's compiler would take two parts of one tensor that are written to for one.
        return torch.from_dlpack(slab)
