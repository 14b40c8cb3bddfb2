"""Continuous decoding: rows in a fixed set of slots, a token one replayed CUDA graph, ended rows replaced by others.

The host learns every `CHUNK` tokens, and a chunk late, which rows have ended: it never waits for the GPU in between.
They are handed out while the GPU writes on. On a processor without graphs the same steps run one by one.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.engines.decoding import Decoded, room_for
from solera.engines.pool import Decoding, Prefilling
from solera.engines.sampling import sample
from solera.errors import SoleraError
from solera.models.attention import PackedTexts, Text
from solera.models.language_model import LanguageModel
from solera.models.memory import free_bytes
from solera.records import Sampling

Ended = tuple[list[int], Decoded]
"""Numbers of requests, and what was written for them."""
NOTHING: Ended = (
    [], Decoded(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), np.zeros(0, np.int64), np.zeros(0, np.bool_)),
)  # fmt: skip
CHUNK = 8
PREFILL_TOKENS = 16_384
TOKEN, POSITION, PROMPT_START, PROMPT_LENGTH, RESPONSE_START, STEP, REQUEST, ALIVE, LIMIT = range(9)
"""Lines of the table of rows: last token and its position, where its keys lie, which token of which request is next,
whether it goes on, and the most tokens of its response: read by the graphs, so that one serves long and short ones."""


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
        places = prompt_tokens + slots * limit
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


class ContinuousDecoder:
    """Decodes any number of prompts in bounded memory. `model` must take plans (`LanguageModel.takes_plans`)."""

    def __init__(
        self, model: LanguageModel, end_token_ids: tuple[int, ...], max_rows: int, *, compiled: bool = True
    ) -> None:
        self.model = model
        self.max_rows = max_rows
        self.ends = torch.tensor(end_token_ids, device=model.device)
        self.graphed = model.device.type == "cuda"
        self.memory: Memory | None = None
        self._graphs: dict[tuple[int, float, float], torch.cuda.CUDAGraph] = {}
        # A step is many small kernels: each goes before what a learner has waiting, which hardly notices.
        self._recording = torch.cuda.Stream(model.device, priority=-1) if self.graphed else None
        if compiled and self.graphed:
            model.compile_layers()

    @torch.no_grad()
    def decode(
        self, prompts: Items[tuple[int, ...]], uniform_BT: npt.NDArray[np.float32], sampling: Sampling
    ) -> Iterator[Ended]:
        """Continue every prompt until an end token, `sampling.max_tokens` or the end of the model's context.
        `uniform_BT` holds the random numbers.

        Yields after every chunk what has ended, which may be nothing, while the GPU goes on.
        """
        for wave in self._waves(prompts, sampling):
            for rows, decoded in self._decode_wave(prompts[wave], uniform_BT[wave], sampling):
                yield [wave.start + row for row in rows], decoded

    def _waves(self, prompts: Items[tuple[int, ...]], sampling: Sampling) -> Iterator[slice]:
        """Stretches of the requests whose prompts fit into half of what memory is there."""
        room, start, total, seen = self._room() // 2, 0, 0, set[tuple[int, ...]]()
        for b, prompt in enumerate(prompts):
            if prompt in seen:
                continue
            if seen and total + len(prompt) > room:
                yield slice(start, b)
                start, total, seen = b, 0, set()
            seen.add(prompt)
            total += len(prompt)
        yield slice(start, len(prompts))

    def _room(self) -> int:
        """Tokens whose keys and values fit: half of the GPU's free memory, what this engine holds counted as free."""
        size = self.model.key_value_dtype.itemsize
        each = sum(2 * heads * dim * size for heads, dim in self.model.key_value_shapes)
        if not self.graphed:
            return 2**31 // each
        held = sum(key.nbytes + value.nbytes for key, value in self.memory.pools) if self.memory else 0
        return (free_bytes(self.model.device) + held) // 2 // each

    def _prepare(self, prompt_tokens: int, requests: int, sampling: Sampling) -> Memory:
        """Memory for these requests: what is there where it is large enough, else new, and graphs with it. Prompts get
        more than they need: each batch's have another length, and graphs take a while to record."""
        limit = sampling.max_tokens
        room = self._room()
        spare = min(prompt_tokens // 2, max(0, room - prompt_tokens - limit))
        slots = min(_bucket(min(requests, self.max_rows)), (room - prompt_tokens - spare) // limit)
        if slots < 1:
            raise SoleraError(
                f"engine: the GPU's free memory does not hold the keys and values of one response of {limit} tokens: "
                "lower sampling.max_tokens"
            )
        # A few slots more are not worth new graphs.
        if self.memory is None or not self.memory.holds(slots * 3 // 4, requests, limit, prompt_tokens):
            if self.memory is not None:  # short and long requests may take turns: one memory for both
                limit, requests = max(limit, self.memory.limit), max(requests, self.memory.requests)
                slots = max(1, min(max(slots, self.memory.slots), (room - prompt_tokens - spare) // limit))
            self._graphs.clear()
            self.memory = None
            for module in self.model.attentions:  # or the old memory would lie beside the new
                vars(module).update(pool_key=None, pool_value=None)
            self.memory = Memory.allocate(self.model, slots, requests, limit, prompt_tokens + spare)
        for module, (key, value) in zip(self.model.attentions, self.memory.pools, strict=True):
            module.pool_key, module.pool_value = key, value
        return self.memory

    def _decode_wave(
        self, prompts: Items[tuple[int, ...]], uniform_BT: npt.NDArray[np.float32], sampling: Sampling
    ) -> Iterator[Ended]:
        number = {prompt: p for p, prompt in enumerate(dict.fromkeys(prompts))}
        starts = np.concatenate([[0], np.cumsum([len(prompt) - 1 for prompt in number])])
        memory = self._prepare(int(starts[-1]), len(prompts), sampling)
        memory.uniform_BT[: len(prompts), : sampling.max_tokens].copy_(torch.from_numpy(uniform_BT))
        self._prefill(list(number), starts)
        waiting = deque(
            (prompt[-1], len(prompt) - 1, int(starts[number[prompt]]), len(prompt) - 1, b)
            for b, prompt in enumerate(prompts)
        )
        yield from Rows(self, memory, sampling, waiting).run()

    def _prefill(self, prompts: list[tuple[int, ...]], starts: npt.NDArray[np.int64]) -> None:
        """Keys and values of every prompt but its last token, which each row computes for itself as its first step."""
        first = 0
        while first < len(prompts):
            stop = max(int(np.searchsorted(starts, starts[first] + PREFILL_TOKENS, "right")) - 1, first + 1)
            tokens = [np.array(prompt[:-1], np.int64) for prompt in prompts[first:stop]]
            begin, length = int(starts[first]), [len(each) for each in tokens]
            if sum(length):
                device = self.model.device
                at = np.concatenate([[0], np.cumsum(length)])
                texts = PackedTexts.of([Text(int(s), n) for s, n in zip(at, length, strict=False)]).to(device)
                position_N = np.concatenate([np.arange(n) for n in length])
                place_N = torch.arange(begin, begin + sum(length), device=device)
                with self.model.uncompiled():
                    self.model.hidden(
                        torch.from_numpy(np.concatenate(tokens)).to(device)[None],
                        torch.from_numpy(position_N).to(device)[None],
                        plan=Prefilling(texts, place_N),
                    )
            first = stop

    def step(self, memory: Memory, rows: int, sampling: Sampling) -> None:
        """One token for each of the first `rows` rows; those that ended go on unseen, at their own place."""
        table = memory.row_table[:, :rows]
        token, position, prompt_start, prompt_length, response_start, step, request, alive, limit = table
        plan = Decoding(prompt_start, prompt_length, response_start, step)
        hidden_S1H = self.model.hidden(token[:, None], position[:, None], plan=plan)
        uniform_S = memory.uniform_BT[request, step]
        token_S, logp_S = self._sample(self.model.logits(hidden_S1H[:, -1]), uniform_S, sampling)
        ended_S = torch.isin(token_S, self.ends)
        request_S = torch.where(alive > 0, request, memory.requests)  # the line after the last, which nobody reads
        memory.token_BT[request_S, step] = token_S.to(torch.int32)
        memory.logp_BT[request_S, step] = logp_S
        memory.length_B[request_S] = step + 1
        memory.finished_B[request_S] = ended_S
        alive.mul_(~ended_S & (step + 1 < limit))
        token.copy_(token_S)
        position.add_(alive)
        step.add_(alive)

    def _sample(self, logits_SV: Tensor, uniform_S: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        if self.graphed and not sampling.truncated:
            from solera.engines import kernels

            return kernels.sample(logits_SV, uniform_S, sampling.temperature)
        return sample(logits_SV, uniform_S, sampling.temperature, sampling.top_p)

    def advance(self, memory: Memory, rows: int, sampling: Sampling, tokens: int) -> None:
        """So many tokens for the first `rows` rows."""
        if not self.graphed:
            for _ in range(tokens):
                self.step(memory, rows, sampling)
            return
        kind = rows, sampling.temperature, sampling.top_p
        graph = self._graphs.get(kind) or self._graphs.setdefault(kind, self._capture(memory, rows, sampling))
        for _ in range(tokens):
            graph.replay()

    def _capture(self, memory: Memory, rows: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """Record one step. It is run before, on rows that are all dead, so that nothing is compiled while recording."""
        kept = memory.row_table.clone()
        memory.row_table[ALIVE] = 0
        stream = self._recording
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step(memory, rows, sampling)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be learning.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step(memory, rows, sampling)
        memory.row_table.copy_(kept)
        return graph


class Rows:
    """Who sits where, as far as the host knows: fills free slots from the queue, moves rows up when few are left."""

    def __init__(
        self,
        decoder: ContinuousDecoder,
        memory: Memory,
        sampling: Sampling,
        waiting: "deque[tuple[int, int, int, int, int]]",
    ) -> None:
        self.decoder = decoder
        self.memory = memory
        self.sampling = sampling
        self.waiting = waiting
        self.rows = _bucket(min(len(waiting), memory.slots), memory.slots)
        self.request: list[int | None] = [None] * memory.slots
        """Who sits in each slot and is not yet known to have ended."""
        self.left = 0
        """Tokens after which every row has ended for certain."""
        self.response_start = [memory.prompt_tokens + slot * memory.limit for slot in range(memory.slots)]
        memory.row_table.zero_()
        memory.row_table[RESPONSE_START].copy_(torch.tensor(self.response_start))

    def run(self) -> Iterator[Ended]:
        self._seat(list(range(self.rows)))
        flags, ended = None, None
        while True:
            tokens = min(CHUNK, self.left)
            self.decoder.advance(self.memory, self.rows, self.sampling, tokens)
            self.left -= tokens
            known, flags = flags, Arriving(self.memory.row_table[ALIVE, : self.rows])
            yield ended.read() if ended else NOTHING
            ended = None
            if not self.decoder.graphed or not self.left:
                known = flags
            if known is None:
                continue
            alive = known.read()[0].tolist() if self.left else [0] * self.rows
            free = [slot for slot in range(self.rows) if not alive[slot]]
            if requests := self._leave(free):
                ended = Ending(self.memory, self.sampling, requests)
            if len(free) == self.rows and not self.waiting:
                break
            if self._seat(free) or self._move_up(free):
                flags = None  # what is on its way tells of the rows before
        if ended:
            yield ended.read()

    def _leave(self, free: list[int]) -> list[int]:
        """Requests that were not known to have ended."""
        ended = [request for slot in free if (request := self.request[slot]) is not None]
        for slot in free:
            self.request[slot] = None
        return ended

    def _seat(self, free: list[int]) -> bool:
        """Give free slots to waiting requests."""
        taken = free[: len(self.waiting)]
        if not taken:
            return False
        lines = []
        for slot in taken:
            token, position, prompt_start, prompt_length, request = self.waiting.popleft()
            self.request[slot] = request
            limit = room_for(self.decoder.model, position + 1, self.sampling.max_tokens)
            start = self.response_start[slot]
            lines.append((token, position, prompt_start, prompt_length, start, 0, request, 1, limit))
        self.left = self.sampling.max_tokens
        device = self.memory.row_table.device
        self.memory.row_table[:, sent(taken, device)] = sent(lines, device).T
        return True

    def _move_up(self, free: list[int]) -> bool:
        """With nobody waiting, gather the living rows at the front once a smaller table holds them."""
        living = sorted(set(range(self.rows)) - set(free))
        smaller = _bucket(max(1, len(living)), self.memory.slots)
        if self.waiting or smaller >= self.rows:
            return False
        order = living + free
        self.response_start[: self.rows] = [self.response_start[slot] for slot in order]
        self.request[: self.rows] = [self.request[slot] for slot in order]
        where = sent(order, self.memory.row_table.device)
        self.memory.row_table[:, : self.rows] = self.memory.row_table[:, where]
        self.rows = smaller
        return True


class Ending:
    """What was written for requests that have ended, on its way from the GPU: nothing is written there any more."""

    def __init__(self, memory: Memory, sampling: Sampling, requests: list[int]) -> None:
        self.requests = requests
        where, limit = sent(requests, memory.row_table.device), sampling.max_tokens
        out = (memory.token_BT[:, :limit], memory.logp_BT[:, :limit], memory.length_B, memory.finished_B)
        self.arriving = Arriving(*(tensor[where] for tensor in out))

    def read(self) -> Ended:
        return self.requests, Decoded(*self.arriving.read())


class Arriving:
    """Tensors on their way from the GPU: nobody waits for them before they are read."""

    def __init__(self, *tensors: Tensor) -> None:
        self.event = torch.cuda.Event() if tensors[0].is_cuda else None
        self.tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        for here, there in zip(self.tensors, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> list[npt.NDArray[Any]]:
        if self.event is not None:
            self.event.synchronize()
        return [tensor.clone().numpy() for tensor in self.tensors]  # memory that the GPU can reach is not kept


def sent(values: list[Any], device: torch.device) -> Tensor:
    """Whole numbers as a tensor on the device, without waiting for what it is doing."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _bucket(rows: int, most: int | None = None) -> int:
    """The next of 8, 12, 16, 24, 32, 48, …: few sizes, so that few graphs are recorded."""
    size = 8
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if most is None else min(size, most)
