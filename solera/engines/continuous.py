"""Continuous decoding: rows in a fixed set of slots, a token one replayed CUDA graph, ended rows replaced by others.

The host learns every few tokens (a *chunk*), and a chunk late, which rows have ended: it never waits for the GPU in
between. They are handed out while the GPU writes on. On a processor without graphs the same steps run one by one.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solera.engines import prompts
from solera.engines.arriving import sent
from solera.engines.decoding import room_for
from solera.engines.fused import FusedModel
from solera.engines.jobs import Job, Kind, Spell, Written
from solera.engines.kv_cache import Continuing, Decoding, Places, Prefilling
from solera.engines.pages import Pages, bytes_per_token
from solera.engines.prefill import Numbers, Pass, PrefillGraphs
from solera.engines.prompts import Group, Stretch
from solera.engines.sampling import sample
from solera.engines.slots import Rows
from solera.engines.tables import ALIVE, Memory, RowTable, bucket
from solera.errors import SoleraError
from solera.models.attention import PackedTexts, Plan
from solera.models.language_model import SHORT, LanguageModel
from solera.models.memory import RECORDING, free_bytes, recording

PREFILL_TOKENS = 16_384
"""Prompt tokens that are computed in one pass."""
SPARE_LINES = 64
"""Requests that can join a full decoder, such as the proof of a sync."""
REMEMBERED = 1024
"""Responses whose lengths tell how long one usually is."""


class ContinuousDecoder:
    """Decodes any number of prompts in bounded memory. `model` must take plans (`LanguageModel.takes_plans`).

    Memory for keys and values is taken as responses grow, and given back as they end. A decoder that `keeps_memory`
    takes it when a batch begins, and gives nothing back before `free`: a learner that works on the same GPU meanwhile
    takes as much as is free when it begins.
    """

    def __init__(
        self,
        model: LanguageModel,
        end_token_ids: tuple[int, ...],
        max_rows: int,
        *,
        compiled: bool = True,
        spell: Spell | None = None,
        keeps_memory: bool = False,
    ) -> None:
        self.model = model
        self.spell = spell
        self.max_rows = max_rows
        self.ends = torch.tensor(end_token_ids, device=model.device)
        self.graphed = model.device.type == "cuda"
        self.prefilled = 0
        self.sampled = 0
        self.memory: Memory | None = None
        self.pages: Pages | None = None
        self.keeps_memory = keeps_memory
        self.lengths = deque[int](maxlen=REMEMBERED)
        self._graphs: dict[tuple[int, float, float], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        """Memory that all graphs share: only one of them runs at a time."""
        self.reset()
        # A step is many small kernels: each goes before what a learner has waiting, which hardly notices.
        self._recording = torch.cuda.Stream(model.device, priority=-1) if self.graphed else None
        if compiled and self.graphed:
            model.compile_layers()
        self.fused = FusedModel.of(model) if compiled and self.graphed else None
        self.prefill_graphs: PrefillGraphs | None = None
        if self.fused is not None and model.key_value_dtype in SHORT:
            self.prefill_graphs = PrefillGraphs(self.fused, PREFILL_TOKENS)

    def reset(self) -> None:
        self.rows: Rows | None = None
        if self.pages is not None:
            self.pages.reset()

    def free(self) -> None:
        """Give up the memory of keys and values, except for its first segment: the graphs know where that is, and take
        long to record."""
        self.reset()
        if self.pages is not None:
            self.pages.shrink()

    @property
    def busy(self) -> bool:
        return self.rows is not None

    @torch.no_grad()
    def admit(self, jobs: list[Job]) -> int:
        if self.rows is None:
            pages = self._prepare_pages()
            jobs = self._fitting(jobs, pages)
            rows = Rows(self, self._prepare(jobs, pages), pages, jobs[0].kind)
            rows.take(jobs)
            self.rows = rows
        elif self.rows.has_room(jobs):
            self.rows.take(jobs)
        else:
            return 0
        return len(jobs)

    @torch.no_grad()
    def advance(self) -> list[Written]:
        assert self.rows is not None
        written = self.rows.advance()
        if self.rows.empty:
            self.reset()
        return written

    @torch.no_grad()
    def drop_cancelled(self) -> None:
        if self.rows is not None:
            self.rows.drop_cancelled()
            if self.rows.empty:
                self.reset()

    @torch.no_grad()
    def recompute(self) -> dict[Job, int]:
        return {} if self.rows is None else self.rows.recompute()

    def _prepare_pages(self) -> Pages:
        """As many as memory allows now."""
        room = self._room()
        if self.pages is None:
            on_gpu = self.model.device.type == "cuda"
            self.pages = Pages(self.model, room, self.keeps_memory, in_one=not on_gpu)
            for module, (key, value) in zip(self.model.attentions, self.pages.pools, strict=True):
                module.pool_key, module.pool_value = key, value
        self.pages.allow(room)
        return self.pages

    def _fitting(self, jobs: list[Job], pages: Pages) -> list[Job]:
        """The first jobs, of one kind, whose prompts fit into half of what memory is there, beside one response."""
        room, total, seen = pages.most // 2, 0, set[tuple[int, ...]]()
        for b, job in enumerate(jobs):
            if job.kind != jobs[0].kind:
                return jobs[:b]
            if job.token_ids in seen:
                continue
            room = min(room, pages.most - pages.count(job.limit))
            total += pages.count(len(job.token_ids) - 1)
            if seen and total > room:
                return jobs[:b]
            seen.add(job.token_ids)
        return jobs

    def _room(self) -> int:
        """Tokens whose keys and values fit: half of the GPU's free memory, what this engine holds counted as free."""
        each = bytes_per_token(self.model)
        if not self.graphed:
            return 2**31 // each
        held = self.pages.nbytes if self.pages else 0
        return (free_bytes(self.model.device) + held) // 2 // each

    def _prepare(self, jobs: list[Job], pages: Pages) -> Memory:
        """Memory for these jobs and for as many as may join them: requests can come one by one. What is there where it
        is large enough, else new, and graphs with it. The table of pages gets more columns than needed: each batch's
        prompts have another length, and graphs take a while to record."""
        limit = room_for(self.model, 0, max(job.sampling.max_tokens for job in jobs))
        lengths = [pages.count(len(prompt) - 1) for prompt in dict.fromkeys(job.token_ids for job in jobs)]
        response = pages.count(limit)
        slots = bucket(self.max_rows)
        requests = max(len(jobs), slots * 5 // 4) + SPARE_LINES
        columns = max(lengths) + response
        if not pages.reserve(sum(lengths) + response):
            raise SoleraError(
                f"engine: the GPU's free memory does not hold the keys and values of one response of {limit} tokens: "
                "lower sampling.max_tokens"
            )
        if self.keeps_memory:
            pages.reserve(sum(lengths) + bucket(min(len(jobs), self.max_rows)) * response)
        if self.memory is None or not self.memory.holds(requests, limit, columns):
            columns = 2 * columns
            if self.memory is not None:  # short and long requests may take turns: one memory for both
                limit, requests = max(limit, self.memory.limit), max(requests, self.memory.requests)
                columns = max(columns, self.memory.columns)
            self._graphs.clear()
            self._pool = None  # torch refuses one whose graphs are gone
            self.memory = None  # or the old memory would lie beside the new
            self.memory = Memory.allocate(self.model.device, slots, requests, limit, columns)
        return self.memory

    def fill(self, groups: list[Group]) -> None:
        """Compute the keys and values of prompts and of texts that continue them, and write each to its place in the
        cache. A prompt has every token but its last, which each row computes for itself as its first step."""
        part, total = list[Group](), 0
        for group in _parts([group for group in groups if len(group[0].token_ids) <= prompts.PART]):
            length = _length(group)
            if part and total + length > PREFILL_TOKENS:
                self._fill(part)
                part, total = [], 0
            part.append(group)
            total += length
        if total:
            self._fill(part)
        for prompt, responses in groups:
            turn = len(prompt.token_ids)
            for text, before in (
                ((prompt, 0), *((response, turn) for response in responses)) if turn > prompts.PART else ()
            ):
                for first in range(0, len(text.token_ids), prompts.PART):
                    pages = prompt.pages + text.pages if before else prompt.pages
                    self.fill_part(Stretch(text.token_ids[first : first + prompts.PART], pages), turn, before + first)

    def fill_part(self, part: Stretch, turn: int, shared: int) -> None:
        """Compute the keys and values of a part of a text, behind `shared` tokens of it. The pages are those of the
        whole text, and `turn` is the length of its prompt."""
        assert self.pages is not None
        position_N = shared + np.arange(len(part.token_ids))
        place_N = position_N + np.where(position_N < turn, 0, -turn % self.pages.tokens)
        page_P = np.array(part.pages, np.int64)
        page_N, at_N = page_P[place_N // self.pages.tokens], place_N % self.pages.tokens
        places = Places(self._sent(page_N), self._sent(at_N))
        plan = Continuing(places, self._sent(page_P), turn, shared)
        self._compute(part.token_ids, position_N, plan)

    def _fill(self, groups: list[Group]) -> None:
        assert self.pages is not None
        texts = Pass.of(groups, self.pages.tokens)
        if self.prefill_graphs is not None and self.prefill_graphs.compute(texts):
            self.prefilled += texts.tokens
            return
        token_N, position_N, page_N, at_N = texts.line_4N
        places = Places(self._sent(page_N), self._sent(at_N))
        plan = Prefilling(PackedTexts.of(texts.texts).to(self.model.device), places)
        self._compute(token_N, position_N, plan)

    def _compute(self, token_N: Numbers, position_N: Numbers, plan: Plan) -> None:
        """If a learner has taken all memory, wait until its update has ended, and begin again."""
        self.prefilled += len(token_N)
        token, position = self._sent(token_N), self._sent(position_N)
        try:
            self._pass(token, position, plan)
            return
        except torch.OutOfMemoryError:
            pass  # its traceback would keep what the pass has computed
        with RECORDING:
            torch.cuda.empty_cache()
        self._pass(token, position, plan)

    def _pass(self, token: Tensor, position: Tensor, plan: Plan) -> None:
        if self.fused is not None:
            self.fused.fill(token, position, plan)
            return
        with self.model.uncompiled():
            self.model.hidden(token[None], position[None], plan=plan)

    def _sent(self, numbers: Numbers) -> Tensor:
        return sent(numbers, self.model.device)

    def step(self, memory: Memory, rows: int, kind: Kind) -> None:
        """One token for each of the first `rows` rows; those that ended go on unseen, at their own place."""
        table = RowTable(*memory.row_table[:, :rows])
        plan = Decoding(memory.page_table[:rows], table.prompt_length, table.step, table.alive)
        logits_SV = self.model.logits(self._hidden(table, plan))
        temperature, top_p = kind
        if logits_SV.is_cuda and temperature > 0 and top_p == 1:
            from solera.engines import kernels

            kernels.write(logits_SV, temperature, self.ends, memory, table)
        else:
            self._write(logits_SV, kind, memory, table)

    def _hidden(self, table: RowTable, plan: Decoding) -> Tensor:
        if self.fused is not None:
            return self.fused.hidden(table.token, table.position, plan)
        return self.model.hidden(table.token[:, None], table.position[:, None], plan=plan)[:, -1]

    def _write(self, logits_SV: Tensor, kind: Kind, memory: Memory, table: RowTable) -> None:
        """Sample a token for every row, write it into memory, and update the rows."""
        step, alive = table.step, table.alive
        token_S, logp_S = sample(logits_SV, memory.uniform_BT[table.request, step], *kind)
        ended_S = torch.isin(token_S, self.ends)
        request_S = torch.where(alive > 0, table.request, memory.requests)  # the line after the last: nobody reads it
        memory.token_BT[request_S, step] = token_S.to(torch.int32)
        memory.logp_BT[request_S, step] = logp_S
        memory.length_B[request_S] = step + 1
        memory.finished_B[request_S] = ended_S
        alive.mul_(~ended_S & (step + 1 < table.limit))
        table.token.copy_(token_S)
        table.position.add_(alive)
        step.add_(alive)

    def steps(self, memory: Memory, rows: int, kind: Kind, tokens: int) -> None:
        """So many tokens for the first `rows` rows."""
        if not self.graphed:
            for _ in range(tokens):
                self.step(memory, rows, kind)
            return
        recorded = rows, *kind
        graph = self._graphs.get(recorded) or self._graphs.setdefault(recorded, self._capture(memory, rows, kind))
        for _ in range(tokens):
            graph.replay()

    def _capture(self, memory: Memory, rows: int, kind: Kind) -> torch.cuda.CUDAGraph:
        """Record one step. It is run before, on rows that are all dead, so that nothing is compiled while recording."""
        kept = memory.row_table.clone()
        memory.row_table[ALIVE] = 0
        stream, graph = self._recording, torch.cuda.CUDAGraph()
        assert stream is not None
        with RECORDING:  # another thread may be learning, or recording itself
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.step(memory, rows, kind)
            torch.cuda.current_stream().wait_stream(stream)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with recording(graph, self._pool, stream):
                self.step(memory, rows, kind)
        memory.row_table.copy_(kept)
        return graph


def _parts(groups: list[Group]) -> Iterator[Group]:
    """The same groups, those too large for one pass in several parts, each with the prompt."""
    for prompt, responses in groups:
        part, total = list[Stretch](), len(prompt.token_ids)
        for response in responses:
            total += len(response.token_ids)
            if part and total > PREFILL_TOKENS:
                yield prompt, part
                part, total = [], len(prompt.token_ids) + len(response.token_ids)
            part.append(response)
        yield prompt, part


def _length(group: Group) -> int:
    prompt, responses = group
    return len(prompt.token_ids) + sum(len(response.token_ids) for response in responses)
