"""The slots of continuous decoding: the memory that a step reads and writes, and who sits where in it."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from solera.engines.arriving import Arriving, sent
from solera.engines.jobs import FEW, Job, Kind, Written, stop_at
from solera.engines.places import FreePlaces
from solera.models.language_model import LanguageModel
from solera.streams import uniforms

if TYPE_CHECKING:
    from solera.engines.continuous import ContinuousDecoder

CHUNK = 8
"""Tokens after which the host asks which rows have ended."""
KEPT_FREE = 8
"""Slots that long requests leave to short ones, such as the proof of a sync, which would otherwise wait for a chunk or
two until a long one ends."""
TOKEN, POSITION, PROMPT_START, PROMPT_LENGTH, RESPONSE_START, STEP, REQUEST, ALIVE, LIMIT = range(9)
"""Lines of the table of rows: last token and its position, where its keys lie, which token of which request is next,
whether it goes on, and the most tokens of its response: read by the graphs, so that one serves long and short ones."""


class RowTable(NamedTuple):
    """The lines of the table by name."""

    token: Tensor
    position: Tensor
    prompt_start: Tensor
    prompt_length: Tensor
    response_start: Tensor
    step: Tensor
    request: Tensor
    alive: Tensor
    limit: Tensor


@dataclass(frozen=True, eq=False)
class Memory:
    """Everything a step reads and writes, at addresses that stay."""

    slots: int
    requests: int
    limit: int
    prompt_tokens: int
    row_table: Tensor
    uniform_BT: Tensor
    token_BT: Tensor
    logp_BT: Tensor
    length_B: Tensor
    finished_B: Tensor
    pools: list[tuple[Tensor, Tensor]]

    @classmethod
    def allocate(cls, model: LanguageModel, slots: int, requests: int, limit: int, prompt_tokens: int) -> "Memory":
        make = partial(torch.zeros, device=model.device)
        places = prompt_tokens + slots * limit + 1  # the last is for keys and values that nobody needs
        return cls(
            slots, requests, limit, prompt_tokens,
            row_table=make(9, slots, dtype=torch.int64),
            uniform_BT=make(requests + 1, limit), token_BT=make(requests + 1, limit, dtype=torch.int32),
            logp_BT=make(requests + 1, limit), length_B=make(requests + 1, dtype=torch.int64),
            finished_B=make(requests + 1, dtype=torch.bool),
            pools=[
                (make(places, heads, dim, dtype=dtype), make(places, heads, dim, dtype=dtype))
                for dtype in [model.key_value_dtype]
                for heads, dim in model.key_value_shapes
            ],
        )  # fmt: skip

    def holds(self, slots: int, requests: int, limit: int, prompt_tokens: int) -> bool:
        return (
            self.slots >= slots and self.requests >= requests and self.limit >= limit
            and self.prompt_tokens >= prompt_tokens
        )  # fmt: skip


class Stretch(NamedTuple):
    """Tokens, and the place in the cache of the first of them."""

    token_ids: tuple[int, ...]
    place: int


class Seat(NamedTuple):
    """A job with the line of memory that its tokens go to, and its prompt."""

    job: Job
    request: int
    prompt_start: int


class Rows:
    """Who sits where, as far as the host knows: fills free slots from the queue, moves rows up when few are left."""

    def __init__(self, decoder: "ContinuousDecoder", memory: Memory, kind: Kind, expected: int) -> None:
        self.decoder = decoder
        self.memory = memory
        self.kind = kind
        self.waiting = deque[Seat]()
        self.rows = bucket(min(expected, memory.slots), memory.slots)
        self.seats: list[Seat | None] = [None] * memory.slots
        """Who sits in each slot and is not yet known to have ended."""
        self.prompts = dict[tuple[int, ...], list[int]]()
        """Of each prompt in memory, where it begins and how many jobs continue it."""
        self.places = FreePlaces(memory.prompt_tokens)
        self.free_requests = list(range(memory.requests))[::-1]
        self.left = 0
        """Tokens after which every row has ended for certain."""
        self.looked = dict[int, int]()
        """Tokens of each request in which stop strings were looked for."""
        self.flags: tuple[int, Arriving] | None = None
        """Which rows were alive after the last chunk, on its way from the GPU, and the number of that chunk."""
        self.chunk = 0
        self.seated = [0] * memory.slots
        """The last chunk before each slot got its job. Flags of that chunk or an earlier one tell of the job before."""
        self.ending: Ending | None = None
        self.response_start = [memory.prompt_tokens + slot * memory.limit for slot in range(memory.slots)]
        memory.row_table.zero_()
        memory.row_table[RESPONSE_START].copy_(torch.tensor(self.response_start))

    @property
    def empty(self) -> bool:
        return self.ending is None and not self.waiting and not self.taken

    def has_room(self, jobs: list[Job]) -> bool:
        """Whether all of these jobs fit beside what is under way."""
        return (
            len(jobs) <= len(self.free_requests)
            and all(job.kind == self.kind and job.limit <= self.memory.limit for job in jobs)
            and self.places.hold([len(prompt) - 1 for prompt in self._new(jobs)])
        )

    def _new(self, jobs: list[Job]) -> list[tuple[int, ...]]:
        """Their prompts that are not in memory, in the order in which they take their places."""
        return [prompt for prompt in dict.fromkeys(job.token_ids for job in jobs) if prompt not in self.prompts]

    def take(self, jobs: list[Job]) -> None:
        """Compute the prompts that are new, and queue the jobs."""
        new = self._new(jobs)
        starts = [self.places.take(len(prompt) - 1) for prompt in new]
        try:
            self.decoder.fill([(Stretch(prompt[:-1], at), []) for prompt, at in zip(new, starts, strict=True)])
        except Exception:
            for prompt, start in zip(new, starts, strict=True):
                self.places.give(start, len(prompt) - 1)
            raise
        self.prompts |= {prompt: [start, 0] for prompt, start in zip(new, starts, strict=True)}
        lines = [self.free_requests.pop() for _ in jobs]
        longest = max(job.limit for job in jobs)
        uniform_BT = torch.from_numpy(uniforms(np.array([job.seed for job in jobs], np.uint64), longest))
        where = sent(lines, self.memory.row_table.device)
        self.memory.uniform_BT[where, :longest] = uniform_BT.to(where.device)
        seats = list[Seat]()
        for job, line in zip(jobs, lines, strict=True):
            place = self.prompts[job.token_ids]
            place[1] += 1
            seats.append(Seat(job, line, place[0]))
        short = [seat for seat in seats if seat.job.limit <= FEW]
        self.waiting = deque([*short, *self.waiting, *(seat for seat in seats if seat.job.limit > FEW)])
        wanted = bucket(min(self.taken + len(self.waiting), self.memory.slots), self.memory.slots)
        self.rows = max(self.rows, wanted)
        self._seat([slot for slot in range(self.rows) if self.seats[slot] is None])

    @property
    def taken(self) -> int:
        return sum(seat is not None for seat in self.seats)

    def advance(self) -> list[Written]:
        """One chunk of tokens. What ended in earlier ones is read while the GPU writes on."""
        self._drop_cancelled()
        if not self.taken:
            return self._ended()
        short = max((seat.job.limit for seat in self.seats if seat and seat.job.limit <= FEW), default=None)
        tokens = min(CHUNK, short or CHUNK, self.left)
        self.decoder.steps(self.memory, self.rows, self.kind, tokens)
        self.left -= tokens
        self.chunk += 1
        flags = Arriving(self.memory.row_table[ALIVE, : self.rows], self.memory.row_table[STEP, : self.rows])
        known, self.flags = self.flags, (self.chunk, flags)
        written = self._ended()
        written += self._cut_at_stops()
        if not self.decoder.graphed or not self.left or short is not None:
            known = self.flags  # worth waiting for
        if known is not None:
            number, arriving = known
            alive = self._alive(number, arriving) if self.left else [0] * self.rows
            self._update([slot for slot, goes_on in enumerate(alive) if not goes_on and self.seated[slot] < number])
        return written

    def _alive(self, number: int, arriving: "Arriving") -> list[int]:
        """Which rows went on after chunk `number`. Counts what they have written."""
        alive, steps = (values.tolist() for values in arriving.read())
        for slot, (goes_on, step) in enumerate(zip(alive, steps, strict=True)):
            seat = self.seats[slot]
            if seat is not None and self.seated[slot] < number:
                self._count(seat.job, step if goes_on else step + 1)
        return alive

    def _count(self, job: Job, tokens: int) -> None:
        """`tokens` were sampled for the job so far, as the host has learned just now."""
        self.decoder.sampled += max(0, tokens - job.sampled)
        job.sampled = max(tokens, job.sampled)

    def _ended(self) -> list[Written]:
        """Read what was written for the jobs that have ended."""
        ending, self.ending = self.ending, None
        written = ending.read() if ending else []
        for each in written:
            self._count(each.job, len(each.token_ids_T))
        return written

    def recompute(self) -> dict[Job, int]:
        """Compute every prompt and what its rows have written so far again, each token at its own place."""
        step_S, alive_S, token_BT, length_B = Arriving(
            self.memory.row_table[STEP], self.memory.row_table[ALIVE], self.memory.token_BT, self.memory.length_B
        ).read()
        written = {} if self.ending is None else {job: job.limit for job in self.ending.jobs}
        responses: dict[tuple[int, ...], list[Stretch]] = {prompt: [] for prompt in self.prompts}
        for slot, seat in enumerate(self.seats):
            if seat is None:
                continue
            job, request, _ = seat
            written[job] = int(step_S[slot]) if alive_S[slot] else int(length_B[request])
            if alive_S[slot] and step_S[slot]:
                # The row computes its newest token itself.
                response = job.token_ids[-1:] + tuple(token_BT[request, : step_S[slot] - 1].tolist())
                responses[job.token_ids].append(Stretch(response, self.response_start[slot]))
        self.decoder.fill(
            [(Stretch(prompt[:-1], self.prompts[prompt][0]), after) for prompt, after in responses.items()]
        )
        return written

    def _drop_cancelled(self) -> None:
        """Nobody waits for these any more."""
        gone = [seat for seat in self.waiting if seat.job.cancelled]
        if gone:
            self.waiting = deque(seat for seat in self.waiting if not seat.job.cancelled)
            self._free(gone)
        self._end([slot for slot, seat in enumerate(self.seats) if seat is not None and seat.job.cancelled])

    def _cut_at_stops(self) -> list[Written]:
        """Jobs whose text holds a stop string now. They end with the token that completes it."""
        looking = [(slot, seat) for slot, seat in enumerate(self.seats) if seat is not None and seat.job.sampling.stop]
        if not looking:
            return []
        spell = self.decoder.spell
        assert spell is not None, "stop strings need a tokenizer"
        where = sent([seat.request for _, seat in looking], self.memory.row_table.device)
        tables = (self.memory.token_BT, self.memory.logp_BT, self.memory.length_B)
        token_BT, logp_BT, length_B = Arriving(*(table[where] for table in tables)).read()
        written, slots = list[Written](), list[int]()
        for b, (slot, (job, request, _)) in enumerate(looking):
            length = int(length_B[b])
            end = stop_at(token_BT[b, :length], self.looked.get(request, 0), job.sampling.stop, spell)
            self.looked[request] = length
            self._count(job, length)
            if end is not None:
                written.append(Written(job, token_BT[b, :end], logp_BT[b, :end], True))
                slots.append(slot)
        self._end(slots)
        return written

    def _end(self, slots: list[int]) -> None:
        """Stop writing for the jobs in these slots, and give the slots to others."""
        if not slots:
            return
        self._leave(slots)
        self.memory.row_table[ALIVE, sent(slots, self.memory.row_table.device)] = 0
        self._seat(slots)

    def _update(self, free: list[int]) -> None:
        """Rows that ended leave these slots, and others take them."""
        if seats := self._leave(free):
            self.ending = Ending(self.memory, seats)
        if not self._seat(free) and self._move_up(free):
            self.flags = None  # what is on its way tells of the rows before

    def _leave(self, free: list[int]) -> list[Seat]:
        """Jobs that were not known to have ended."""
        ended = [seat for slot in free if (seat := self.seats[slot]) is not None]
        for slot in free:
            self.seats[slot] = None
        self._free(ended)
        return ended

    def _free(self, seats: list[Seat]) -> None:
        """Give back the memory of jobs that have ended, and of prompts that no other job continues."""
        for seat in seats:
            self.free_requests.append(seat.request)
            self.looked.pop(seat.request, None)
            prompt = self.prompts[seat.job.token_ids]
            prompt[1] -= 1
            if not prompt[1]:
                self.places.give(prompt[0], len(seat.job.token_ids) - 1)
                del self.prompts[seat.job.token_ids]

    def _seat(self, free: list[int]) -> bool:
        """Give free slots to waiting jobs."""
        taken = free[: self._seatable(len(free))]
        if not taken:
            return False
        lines = []
        for slot in taken:
            seat = self.seats[slot] = self.waiting.popleft()
            self.seated[slot] = self.chunk
            token, before, limit = seat.job.token_ids[-1], len(seat.job.token_ids) - 1, seat.job.limit
            start = self.response_start[slot]
            lines.append((token, before, seat.prompt_start, before, start, 0, seat.request, 1, limit))
            self.left = max(self.left, limit)
        device = self.memory.row_table.device
        self.memory.row_table[:, sent(taken, device)] = sent(lines, device).T
        return True

    def _seatable(self, free: int) -> int:
        """How many waiting jobs get one of these free slots. Where jobs outnumber the free slots of a large table, the
        last few are kept for short ones."""
        unseated = self.rows - self.taken
        if len(self.waiting) <= unseated or self.memory.slots < 32 * KEPT_FREE:
            return min(free, len(self.waiting))
        short = next((i for i, seat in enumerate(self.waiting) if seat.job.limit > FEW), len(self.waiting))
        return min(free, max(short, unseated - KEPT_FREE))

    def _move_up(self, free: list[int]) -> bool:
        """With nobody waiting, gather the living rows at the front once a smaller table holds them."""
        living = sorted(set(range(self.rows)) - set(free))
        smaller = bucket(max(1, len(living)), self.memory.slots)
        if self.waiting or smaller >= self.rows:
            return False
        order = living + free
        self.response_start[: self.rows] = [self.response_start[slot] for slot in order]
        self.seats[: self.rows] = [self.seats[slot] for slot in order]
        where = sent(order, self.memory.row_table.device)
        self.memory.row_table[:, : self.rows] = self.memory.row_table[:, where]
        self.rows = smaller
        return True


class Ending:
    """What was written for jobs that have ended, on its way from the GPU: nothing is written there any more."""

    def __init__(self, memory: Memory, seats: list[Seat]) -> None:
        self.jobs = [seat.job for seat in seats]
        where = sent([seat.request for seat in seats], memory.row_table.device)
        limit = max(job.limit for job in self.jobs)
        out = (memory.token_BT[:, :limit], memory.logp_BT[:, :limit], memory.length_B, memory.finished_B)
        self.arriving = Arriving(*(tensor[where] for tensor in out))

    def read(self) -> list[Written]:
        token_BT, logp_BT, length_B, stopped_B = self.arriving.read()
        lengths, stopped = length_B.tolist(), stopped_B.tolist()
        return [
            Written(job, token_BT[b, : lengths[b]], logp_BT[b, : lengths[b]], stopped[b])
            for b, job in enumerate(self.jobs)
        ]


def bucket(rows: int, most: int | None = None) -> int:
    """The next of 8, 12, 16, 24, 32, 48, …: few sizes, so that few graphs are recorded."""
    size = 8
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if most is None else min(size, most)
