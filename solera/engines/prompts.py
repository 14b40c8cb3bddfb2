"""The prompts of continuous decoding: each is computed once, however many jobs continue it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from solera.engines.pages import Pages

if TYPE_CHECKING:
    from solera.engines.continuous import ContinuousDecoder
    from solera.engines.seats import Seat

PART = 2048
"""Prompts with more tokens are always computed in parts of so many, one between two chunks, so that their keys do not
depend on what else goes on."""
TOGETHER = 8192
"""Tokens of shorter prompts that are computed in one pass between two chunks. A small model takes hardly longer for
them than for a fourth, and each pass is hundreds of kernels that the host must start."""


class Stretch(NamedTuple):
    """Tokens, and the pages that hold their keys and values from the first page's first place on."""

    token_ids: npt.NDArray[np.int64]
    pages: list[int]


Group = tuple[Stretch, list[Stretch]]
"""A prompt and the texts that continue it."""


@dataclass(eq=False)
class Prefix:
    """The pages of a prompt, without its last token, how many jobs continue it, and how much of it is computed."""

    token_ids: tuple[int, ...]
    pages: list[int]
    jobs: int = 0
    computed: int = 0
    held_up: list["Seat"] = field(default_factory=list)
    """Jobs that wait until all of it is computed."""

    @property
    def stretch(self) -> Stretch:
        return Stretch(np.array(self.token_ids, np.int64), self.pages)

    @property
    def is_computed(self) -> bool:
        return self.computed == len(self.token_ids)


class Prompts:
    """The prompts of the jobs under way: those in memory, and those that are still to be computed."""

    def __init__(self, decoder: "ContinuousDecoder", pages: Pages) -> None:
        self.decoder = decoder
        self.pages = pages
        self.all = dict[tuple[int, ...], Prefix]()
        self.unfinished = deque[Prefix]()
        """Each turn computes some of them, or a part of the first."""
        self.page_count = 0
        """Pages of all prompts."""

    def new(self, prompts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those that nobody has asked for before."""
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.all]

    def add(self, prompts: list[tuple[int, ...]], one_pass: bool) -> None:
        """Compute the short ones now, or as many as `one_pass` takes. The others follow turn by turn."""
        added = {prompt: Prefix(prompt[:-1], self.pages.take(self.pages.count(len(prompt) - 1))) for prompt in prompts}
        short = [prefix for prefix in added.values() if len(prefix.token_ids) <= PART]
        try:
            self._compute(_first_pass(short) if one_pass else short)
        except Exception:
            for prefix in added.values():
                self.pages.give(prefix.pages)
            raise
        self.all |= added
        self.page_count += sum(len(prefix.pages) for prefix in added.values())
        self.unfinished.extend(prefix for prefix in added.values() if not prefix.is_computed)

    def compute_more(self) -> list["Seat"]:
        """One pass. Returns the jobs that have waited for it."""
        first = self.unfinished[0]
        if len(first.token_ids) > PART:
            part = np.array(first.token_ids[first.computed : first.computed + PART], np.int64)
            self.decoder.fill_part(Stretch(part, first.pages), len(first.token_ids), first.computed)
            first.computed += len(part)
        else:
            self._compute(_first_pass(self.unfinished))
        ready: list[Seat] = []
        while self.unfinished and self.unfinished[0].is_computed:
            prefix = self.unfinished.popleft()
            ready += prefix.held_up
            prefix.held_up = []
        return ready

    def compute_again(self, responses: dict[tuple[int, ...], list[Stretch]]) -> None:
        """With other weights: prompts in memory, and what was written after them. Unfinished ones begin again."""
        for prefix in self.unfinished:
            prefix.computed = 0
        computed = {prompt: prefix for prompt, prefix in self.all.items() if prefix not in self.unfinished}
        self.decoder.fill([(prefix.stretch, responses.get(prompt, [])) for prompt, prefix in computed.items()])

    def drop_cancelled(self) -> list["Seat"]:
        """Returns jobs that nobody waits for any more. What nobody needs is not computed."""
        gone = [seat for prefix in self.unfinished for seat in prefix.held_up if seat.job.cancelled]
        if gone:
            for prefix in self.unfinished:
                prefix.held_up = [seat for seat in prefix.held_up if not seat.job.cancelled]
            self.unfinished = deque(prefix for prefix in self.unfinished if prefix.held_up)
        return gone

    def leave(self, prompt: tuple[int, ...], prefix: Prefix) -> list[int]:
        """A job has ended. Returns the pages of its prompt if no other continues it."""
        prefix.jobs -= 1
        if prefix.jobs:
            return []
        del self.all[prompt]
        self.page_count -= len(prefix.pages)
        return prefix.pages

    def _compute(self, prefixes: list[Prefix]) -> None:
        self.decoder.fill([(prefix.stretch, []) for prefix in prefixes])
        for prefix in prefixes:
            prefix.computed = len(prefix.token_ids)


def _first_pass(prefixes: Iterable[Prefix]) -> list[Prefix]:
    """The first of these prompts that are computed in one pass between two chunks."""
    chosen, total = list[Prefix](), 0
    for prefix in prefixes:
        total += len(prefix.token_ids)
        if len(prefix.token_ids) > PART or (chosen and total > TOGETHER):
            break
        chosen.append(prefix)
    return chosen
