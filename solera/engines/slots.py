"""The slots of continuous decoding: who sits where in the tables.

A row gets pages of keys and values as its response grows. If none are left, the row that began last gives way: it
waits, gives its pages to the others, and begins again when there is room, with the same random numbers. The row that
began first always goes on, because one response of any length fits beside the prompts (`Pages.floor`).
"""

import math
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from solera.engines.arriving import Arriving, sent
from solera.engines.jobs import FEW, Job, Kind, Written, reach, stop_at
from solera.engines.pages import NOBODY, Pages
from solera.engines.prompts import Prompts, Stretch
from solera.engines.seats import Mask, Numbers, Seat, Seats
from solera.engines.tables import ALIVE, STEP, Memory, bucket
from solera.streams import uniforms

if TYPE_CHECKING:
    from solera.engines.continuous import ContinuousDecoder

CHUNK = 8
"""Tokens after which the host asks which rows have ended, at the latest."""
MANY = 1024
"""From so many rows on, the host asks twice as often. A token then takes so long that rows that have ended, and wait
for a new response, cost more than asking."""
KEPT_FREE = 8
"""Slots that long requests leave to short ones, such as the proof of a sync, which would otherwise wait for a chunk or
two until a long one ends."""


class Rows:
    """Who sits where, as far as the host knows: fills free slots from the queue, moves rows up when few are left."""

    def __init__(self, decoder: "ContinuousDecoder", memory: Memory, pages: Pages, kind: Kind) -> None:
        self.decoder = decoder
        self.memory = memory
        self.pages = pages
        self.kind = kind
        self.waiting = deque[Seat]()
        self.rows = bucket(1, memory.slots)
        self.seats = Seats(memory.slots)
        """Who sits in each row and is not yet known to have ended."""
        self.prompts = Prompts(decoder, pages)
        self.free_requests = list(range(memory.requests))[::-1]
        self.longest = 0
        """Most tokens that any of the responses may have."""
        self.now = 0
        """Tokens that were written for every row."""
        self.until = 0
        """When every row has ended for certain."""
        self.enough_until = 0
        """When the first row needs another page."""
        self.looked = dict[int, int]()
        """Tokens of each request in which stop strings were looked for."""
        self.flags: tuple[int, Arriving] | None = None
        """Which rows were alive after the last chunk, on its way from the GPU, and the number of that chunk."""
        self.chunk = 0
        self.ending: Ending | None = None
        memory.row_table.zero_()
        memory.page_table.fill_(NOBODY)

    @property
    def empty(self) -> bool:
        return self.ending is None and not self.waiting and not self.taken and not self.prompts.unfinished

    def has_room(self, jobs: list[Job]) -> bool:
        """Whether all of these jobs fit beside what is under way: their prompts without a row giving way for them."""
        new = sum(self.pages.count(len(prompt) - 1) for prompt in self.prompts.new(job.token_ids for job in jobs))
        prompts = new + self.prompts.page_count
        return (
            len(jobs) <= len(self.free_requests)
            and all(job.kind == self.kind and job.limit <= self.memory.limit for job in jobs)
            and all(self._columns(job) <= self.memory.columns for job in jobs)
            and prompts <= self.pages.most // 2
            and self.pages.reserve(prompts + self.pages.count(max(self.longest, *(job.limit for job in jobs))))
            and self.pages.can_take(new)
        )

    def _columns(self, job: Job) -> int:
        return self.pages.count(len(job.token_ids) - 1) + self.pages.count(job.limit)

    def take(self, jobs: list[Job]) -> None:
        """Queue the jobs, and compute prompts that are new: at once if no row has to wait for that."""
        self.prompts.add(self.prompts.new(job.token_ids for job in jobs), one_pass=self.taken > 0)
        self._queue(jobs)
        self._seat()

    def _queue(self, jobs: list[Job]) -> None:
        lines = [self.free_requests.pop() for _ in jobs]
        longest = max(job.limit for job in jobs)
        self.longest = max(self.longest, longest)
        uniform_BT = uniforms(np.array([job.seed for job in jobs], np.uint64), longest)
        device = self.memory.row_table.device
        self.memory.uniform_BT[sent(lines, device), :longest] = sent(uniform_BT, device)
        ready = list[Seat]()
        for job, line in zip(jobs, lines, strict=True):
            prefix = self.prompts.all[job.token_ids]
            prefix.jobs += 1
            (ready if prefix.is_computed else prefix.held_up).append(Seat(job, line, prefix))
        self._enqueue(ready)

    def _enqueue(self, seats: list[Seat]) -> None:
        """Short ones go first."""
        short = [seat for seat in seats if seat.job.limit <= FEW]
        self.waiting = deque([*short, *self.waiting, *(seat for seat in seats if seat.job.limit > FEW)])

    @property
    def taken(self) -> int:
        return self.seats.taken

    def advance(self) -> list[Written]:
        """One chunk of tokens. What ended in earlier ones is read while the GPU writes on."""
        if self.prompts.unfinished:
            self._enqueue(self.prompts.compute_more())
            self._seat()
        written = self._make_room()
        if not self.taken:
            return written + self._ended()
        limits = self.seats.limit_S[self.seats.taken_S]
        short = int(limits[limits <= FEW].max(initial=0))
        chunk = CHUNK if self.rows < MANY else max(1, CHUNK // 2)
        tokens = min(chunk, short or chunk, self.until - self.now)
        self.decoder.steps(self.memory, self.rows, self.kind, tokens)
        self.now += tokens
        self.chunk += 1
        flags = Arriving(self.memory.row_table[ALIVE, : self.rows], self.memory.row_table[STEP, : self.rows])
        known, self.flags = self.flags, (self.chunk, flags)
        written += self._ended()
        written += self._cut_at_stops()
        if not self.decoder.graphed or self.now == self.until or short:
            known = self.flags  # worth waiting for
        if known is not None:
            self._learn(*known)
        return written

    def _learn(self, number: int, arriving: "Arriving") -> None:
        """Rows that had ended after chunk `number` make way. Counts what all have written."""
        known_S = self.seats.taken_S & (self.seats.chunk_S < number)
        if self.now < self.until:
            alive_S, step_S = arriving.read()
            known_S = known_S[: len(alive_S)]
            self._count(np.where(alive_S > 0, step_S, step_S + 1), known_S)
            known_S &= alive_S == 0
        self._update(np.flatnonzero(known_S).tolist())

    def _count(self, tokens_S: Numbers, known_S: Mask) -> None:
        """So many tokens were sampled for the first rows, where `known_S`, as the host has learned just now."""
        self.decoder.sampled += self.seats.count(tokens_S, known_S)

    def _make_room(self) -> list[Written]:
        """Give every row the pages of its next chunk. If there are too few, look which rows have ended, and if there
        still are, the rows that began last give way. Returns what was written for rows that had ended before."""
        written = list[Written]()
        if self.now + CHUNK <= self.enough_until:
            return written
        missing_S = self._missing_S()
        if self.flags is not None and not self.pages.can_take(int(missing_S.sum())):
            written = self._ended()
            known, self.flags = self.flags, None
            self._learn(*known)
            missing_S = self._missing_S()
        while not self.pages.can_take(int(missing_S.sum())):
            self._give_way(self.seats.newest())
            missing_S = self._missing_S()
        self._add_pages(missing_S)
        room_S = self.seats.pages_S * self.pages.tokens
        growing_S = self.seats.taken_S & (room_S < self.seats.limit_S)
        ends = (self.seats.began_S + room_S)[growing_S]
        self.enough_until = int(ends.min()) if len(ends) else self.until + CHUNK
        return written

    def _missing_S(self) -> Numbers:
        """Pages that the next chunk of each row needs."""
        needed_S = -(-self.seats.tokens_S(self.now + CHUNK) // self.pages.tokens)
        return np.where(self.seats.taken_S, needed_S - self.seats.pages_S, 0)

    def _add_pages(self, count_S: Numbers) -> None:
        """Give so many pages to each row."""
        added = list[tuple[int, int, int]]()
        slots = np.repeat(np.arange(len(count_S)), count_S).tolist()
        for slot, page in zip(slots, self.pages.take(len(slots)), strict=True):
            seat = self.seats[slot]
            assert seat is not None
            added.append((slot, len(seat.prefix.pages) + len(seat.pages), page))
            seat.pages.append(page)
        self.seats.pages_S += count_S
        if added:
            slot_A, column_A, page_A = sent(added, self.memory.page_table.device).T
            self.memory.page_table[slot_A, column_A] = page_A

    def _give_way(self, slot: int) -> None:
        """The row in this slot waits until there is room, and begins again."""
        (seat,) = self.seats.remove([slot])
        self._clear([slot])
        self.pages.give(seat.pages)
        self.looked.pop(seat.request, None)
        seat.pages = []
        seat.job.earlier.clear()  # the weights of then will have written none of it
        self.waiting.appendleft(seat)

    def _ended(self) -> list[Written]:
        """Read what was written for the jobs that have ended."""
        ending, self.ending = self.ending, None
        written = ending.read() if ending else []
        for seat, each in zip(ending.seats if ending else [], written, strict=True):
            self.decoder.sampled += max(0, len(each.token_ids_T) - seat.counted)
        self.decoder.lengths += [len(each.token_ids_T) for each in written if each.job.limit > FEW]
        return written

    def recompute(self) -> dict[Job, int]:
        """Compute every prompt and what its rows have written so far again, each token at its own place."""
        step_S, alive_S, token_BT, length_B = Arriving(
            self.memory.row_table[STEP], self.memory.row_table[ALIVE], self.memory.token_BT, self.memory.length_B
        ).read()
        written = {} if self.ending is None else {seat.job: seat.job.limit for seat in self.ending.seats}
        responses = dict[tuple[int, ...], list[Stretch]]()
        begun = list[tuple[Seat, int]]()
        for slot, seat in self.seats:
            alive, step = alive_S[slot], int(step_S[slot])
            written[seat.job] = step if alive else int(length_B[seat.request])
            if alive and step:
                begun.append((seat, step))
        # The last token of the prompt, then the response. The row computes its newest token itself.
        last_R, longest = [seat.job.token_ids[-1] for seat, _ in begun], max((step for _, step in begun), default=1)
        token_RT = token_BT[[seat.request for seat, _ in begun], : longest - 1]
        token_RT = np.column_stack([last_R, token_RT]).astype(np.int64, copy=False)
        for (seat, step), token_T in zip(begun, token_RT, strict=True):
            responses.setdefault(seat.job.token_ids, []).append(Stretch(token_T[:step], seat.pages))
        self.prompts.compute_again(responses)
        return written

    def drop_cancelled(self) -> None:
        """Nobody waits for these any more."""
        gone = self.prompts.drop_cancelled() + [seat for seat in self.waiting if seat.job.cancelled]
        if gone:
            self.waiting = deque(seat for seat in self.waiting if not seat.job.cancelled)
            self._free(gone)
        self._end([slot for slot, seat in self.seats if seat.job.cancelled])

    def _cut_at_stops(self) -> list[Written]:
        """Jobs whose text holds a stop string now. They end with the token that completes it."""
        looking = self.seats.with_stops()
        ends = self._stops(looking) if looking else {}
        if not ends:
            return []
        stopped = [(seat, ends[slot]) for slot, seat in looking if slot in ends]
        where, limit = sent([seat.request for seat, _ in stopped], self.memory.row_table.device), max(ends.values())
        token_BT, logp_BT = Arriving(
            self.memory.token_BT[:, :limit][where], self.memory.logp_BT[:, :limit][where]
        ).read()
        self.decoder.lengths += ends.values()
        self._end(list(ends))
        return [Written(seat.job, token_BT[b, :end], logp_BT[b, :end], True) for b, (seat, end) in enumerate(stopped)]

    def _stops(self, looking: list[tuple[int, Seat]]) -> dict[int, int]:
        """The slots whose text holds a stop string now, and its number of tokens. New tokens are copied, and those
        before them in which a stop string may have begun, not whole responses: the GPU waits meanwhile."""
        spell, device = self.decoder.spell, self.memory.row_table.device
        assert spell is not None, "stop strings need a tokenizer"
        slots, seats = zip(*looking, strict=True)
        known_R = np.array([self.looked.get(seat.request, 0) for seat in seats])
        first_R = np.maximum(known_R - max(reach(seat.job.sampling.stop) for seat in seats), 0)
        width = int((self.seats.tokens_S(self.now)[list(slots)] - first_R).max())
        at_RW = np.minimum(first_R[:, None] + np.arange(width), self.memory.limit - 1)
        where = sent([seat.request for seat in seats], device)
        token_RW, length_R = Arriving(
            self.memory.token_BT[where[:, None], sent(at_RW, device)], self.memory.length_B[where]
        ).read()
        tokens_S, known_S = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.bool_)
        tokens_S[list(slots)], known_S[list(slots)] = length_R, True
        self._count(tokens_S, known_S)
        ends = dict[int, int]()
        for r, (slot, seat) in enumerate(looking):
            first, length = int(first_R[r]), int(length_R[r])
            end = stop_at(token_RW[r, : length - first], int(known_R[r]) - first, seat.job.sampling.stop, spell)
            self.looked[seat.request] = length
            if end is not None:
                ends[slot] = first + end
        return ends

    def _end(self, slots: list[int]) -> None:
        """Stop writing for the jobs in these slots, and give the slots to others."""
        if self._leave(slots):
            self._seat()

    def _update(self, free: list[int]) -> None:
        """Rows that ended leave these slots, and others take them."""
        if seats := self._leave(free):
            self.ending = Ending(self.memory, seats)
        if not self._seat() and self._move_up():
            self.flags = None  # what is on its way tells of the rows before

    def _leave(self, free: list[int]) -> list[Seat]:
        """Returns the jobs that had these slots."""
        ended = self.seats.remove(free)
        self._clear(free)
        self._free(ended)
        return ended

    def _clear(self, slots: list[int]) -> None:
        """These slots have no job. They write to a page that nobody reads, and attend to nothing."""
        if slots:
            where = sent(slots, self.memory.row_table.device)
            self.memory.row_table.index_fill_(1, where, 0)  # not `= 0`: the host would wait for the GPU
            self.memory.page_table[:, 0].index_fill_(0, where, NOBODY)

    def _free(self, seats: list[Seat]) -> None:
        """Give back the memory of jobs that have ended, and of prompts that no other job continues."""
        pages = list[int]()
        for seat in seats:
            self.free_requests.append(seat.request)
            self.looked.pop(seat.request, None)
            pages += seat.pages + self.prompts.leave(seat.job.token_ids, seat.prefix)
        self.pages.give(pages)

    def _seat(self) -> bool:
        """Give free slots to waiting jobs."""
        count = self._seatable()
        if not count:
            return False
        taken = self.seats.free(self.rows)[:count]
        seats = [self.waiting.popleft() for _ in taken]
        lines, columns = [], max(len(seat.prefix.pages) for seat in seats)
        self.seats.put(taken, seats, self.now, self.chunk)
        for seat in seats:
            token, before = seat.job.token_ids[-1], len(seat.job.token_ids) - 1
            lines.append((token, before, before, 0, seat.request, 1, seat.job.limit))
            self.until = max(self.until, self.now + seat.job.limit)
        self.enough_until = self.now  # their first pages are still to come
        device = self.memory.row_table.device
        where = sent(taken, device)
        self.memory.row_table[:, where] = sent(lines, device).T
        pages = [seat.prefix.pages + [NOBODY] * (columns - len(seat.prefix.pages)) for seat in seats]
        self.memory.page_table[where, :columns] = sent(pages, device)
        return True

    def _seatable(self) -> int:
        """How many waiting jobs get a slot. Where jobs outnumber the slots of a large table, the last few are kept for
        short ones. There are as many rows as can be seated."""
        fitting = self._fitting()
        if not fitting:
            return 0
        taken = self.taken
        self.rows = max(self.rows, bucket(min(taken + fitting, self.memory.slots), self.memory.slots))
        unseated = self.rows - taken
        count = min(unseated, fitting)
        if self.rows < self.memory.slots or len(self.waiting) <= unseated or self.memory.slots < 32 * KEPT_FREE:
            return count
        short = next((i for i, seat in enumerate(self.waiting) if seat.job.limit > FEW), len(self.waiting))
        return min(count, max(short, unseated - KEPT_FREE))

    def _fitting(self) -> int:
        """How many waiting jobs will probably find a slot and memory, if each response gets as long as usual. If no row
        is taken, one does."""
        if not self.waiting:
            return 0
        taken, usual = self.taken, self._usual_length()
        usual_S = np.minimum(self.seats.limit_S, usual).astype(np.int64)
        expected_S = np.maximum(self.seats.pages_S, -(-usual_S // self.pages.tokens))
        left = self.pages.most - self.prompts.page_count - int(expected_S[self.seats.taken_S].sum())
        slots = self.memory.slots - taken
        for number, seat in enumerate(islice(self.waiting, slots)):
            left -= self.pages.count(int(min(seat.job.limit, usual)))
            if left < 0:
                return max(number, 1 - taken)
        return min(slots, len(self.waiting))

    def _usual_length(self) -> float:
        """Tokens that were written for each response that ended, those of the rows under way included: the first to end
        are short ones."""
        ended = self.decoder.lengths
        return (sum(ended) + int(self.seats.tokens_S(self.now).sum())) / len(ended) if ended else math.inf

    def _move_up(self) -> bool:
        """With nobody to seat, gather the living rows at the front once a smaller table holds them."""
        living = np.flatnonzero(self.seats.taken_S).tolist()
        smaller = bucket(max(1, len(living)), self.memory.slots)
        if smaller >= self.rows:
            return False
        order = living + self.seats.free(self.rows)
        self.seats.reorder(order)
        where = sent(order, self.memory.row_table.device)
        self.memory.row_table[:, : self.rows] = self.memory.row_table[:, where]
        self.memory.page_table[: self.rows] = self.memory.page_table[where]
        self.rows = smaller
        return True


class Ending:
    """What was written for jobs that have ended, on its way from the GPU: nothing is written there any more."""

    def __init__(self, memory: Memory, seats: list[Seat]) -> None:
        self.seats = seats
        where = sent([seat.request for seat in seats], memory.row_table.device)
        limit = max(seat.job.limit for seat in seats)
        out = (memory.token_BT[:, :limit], memory.logp_BT[:, :limit], memory.length_B, memory.finished_B)
        self.arriving = Arriving(*(tensor[where] for tensor in out))

    def read(self) -> list[Written]:
        token_BT, logp_BT, length_B, stopped_B = self.arriving.read()
        lengths, stopped = length_B.tolist(), stopped_B.tolist()
        return [
            Written(seat.job, token_BT[b, : lengths[b]], logp_BT[b, : lengths[b]], stopped[b])
            for b, seat in enumerate(self.seats)
        ]
