"""The engine inside the training process. It has its own copy of the weights, or shares the learner's."""

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import numpy as np
import torch

from solera.config import InFlight
from solera.engines.decoding import PlainDecoder, room_for
from solera.engines.faults import DivergedError
from solera.engines.jobs import Decoder, Job, Spell, Written
from solera.engines.submission import Outcome, Submission, hand_out
from solera.errors import BadRequestError, SoleraError
from solera.models.digest import describe, locate
from solera.models.extent import WIDER
from solera.models.language_model import LanguageModel
from solera.models.memory import RECORDING
from solera.protocols import Weights, Work
from solera.records import Completion, Manifest, Sampling


def refuse_too_long(prompt: int, limit: int, most: int | None) -> None:
    """Refuse a prompt that leaves no room for `max_tokens` in the model's context."""
    if most is not None and prompt + limit > most:
        raise SoleraError(
            f"a prompt of {prompt} tokens and sampling.max_tokens = {limit} do not fit the model's context of {most} "
            "tokens: "
            + ("lower sampling.max_tokens" if prompt < most else "shorten the prompt, or use a model with a longer one")
        )


@dataclass(eq=False)
class Loading:
    """New weights that wait for the engine's thread to make way."""

    in_flight: InFlight
    done: threading.Event = field(default_factory=threading.Event)


class InProcessEngine:
    """Continues texts in a thread of its own. Requests that are made before the event loop comes round again begin
    together. Later ones join while those are still being written, as soon as there is room.

    With `beside`, a GPU decodes in a stream of its own, which goes first: another thread's work there goes on
    meanwhile. A `shared` model has the learner's parameters for its own: it is always up to date, and a sync only
    changes the version. With `early`, each response is handed out when it is written; without, those that were asked
    for together are handed out together. `spell` gives the text of tokens; stop strings need it. `count` is told after
    each turn of the decoder how many tokens were sampled so far.
    """

    def __init__(
        self,
        model: LanguageModel,
        end_token_ids: tuple[int, ...],
        max_rows: int,
        compute: torch.dtype,
        compiled: bool = False,
        beside: bool = False,
        shared: bool = False,
        early: bool = False,
        spell: Spell | None = None,
        count: Callable[[int], None] = lambda sampled: None,
    ) -> None:
        self.model = model
        self.compute = compute
        self.shared = shared
        self.early = early
        self.spell = spell
        self._count = count
        self.dtype = str(model.module.dtype)
        self.slots = max_rows
        self.held = Manifest(lineage="", version=0, tensors=())
        self._work = Work()
        self._digesting = 0.0
        self.decoder = _decoder(model, end_token_ids, max_rows, compiled, spell, keeps_memory=beside)
        self._vocabulary: int = model.module.get_input_embeddings().num_embeddings
        self._readable: tuple[int, ...] = ()
        """The prompt that was checked last. All members of a group have the same one."""
        self._stream = torch.cuda.Stream(model.device, priority=-1) if beside and model.device.type == "cuda" else None
        self._asking: Submission | None = None
        self._inbox = SimpleQueue[Submission | None]()
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()
        """Held while anything is being decoded. Weights change only in between."""
        self._loading: Loading | None = None

    @property
    def version(self) -> int:
        return self.held.version

    @property
    def sampled(self) -> int:
        return self.decoder.sampled

    @property
    def work(self) -> Work:
        return replace(self._work, digesting=self._digesting)

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        """Copy the tensors into the engine's own weights, unless they are the same memory.

        `drain` lets the responses under way end first, and begins no others meanwhile. With `keep` and `abort`, which
        do the same here, they continue with the new weights, and their key-value cache is computed again.
        """
        loading = self._loading = Loading(in_flight)
        try:
            with self._writing:
                arrived = self._copy(weights)
                self.held = Manifest(weights.lineage, weights.version, ())
        finally:
            self._loading = None
            loading.done.set()
        start = time.perf_counter()  # nothing changes the weights now: others decode with them meanwhile
        specs = (locate if self.shared else describe)(arrived.items())
        self._digesting += time.perf_counter() - start
        self.held = Manifest(weights.lineage, weights.version, specs)
        return self.held

    @torch.no_grad()
    def _copy(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Returns the engine's own tensors that were written to."""
        own, arrived, here = self.model.parameters(), dict[str, torch.Tensor](), self.model.device
        if self._stream is not None:  # it may still be computing with the weights before
            torch.cuda.current_stream(here).wait_stream(self._stream)
        for name, tensor in weights.tensors:
            if name not in own or own[name].shape != tensor.shape:
                raise SoleraError(f"engine: tensor {name} of shape {tuple(tensor.shape)} does not fit its model")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
            arrived[name] = own[name]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(here))
        return arrived

    def weights(self) -> Weights:
        own = {} if self.shared else self.model.parameters()
        return Weights(self.held.lineage, self.held.version, iter(own.items()))

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Continue one text, up to `sampling.max_tokens` or the end of the model's context; where the text fills it
        already, with nothing. Both are cut off: `finish_reason` is `length`."""
        self._refuse_unreadable(token_ids)
        limit = room_for(self.model, len(token_ids), sampling.max_tokens)
        if limit < 1:
            return self._nothing(sampling)
        loop, job = asyncio.get_running_loop(), Job(token_ids, sampling, seed, limit)
        asked, answer = self._asking, loop.create_future()
        if asked is None or asked.loop is not loop:
            asked = self._asking = Submission(loop)  # read once: another thread's loop may ask at the same time
            loop.call_soon(self._submit, asked)  # runs after every task that is ready now has asked
        asked.answers[job] = answer
        try:
            return await answer
        finally:
            if not answer.done() or answer.cancelled():
                job.cancelled = True
                asked.some_cancelled = True

    def close(self) -> None:
        return

    def free(self) -> None:
        """Give up the memory of keys and values, so that another process can use it. The next request takes it again.
        On a GPU, CUDA graphs stay with their memory, and so does the segment of at most 256 MiB that they begin
        with."""
        with self._writing:
            self.decoder.free()
        if self.model.device.type == "cuda":
            with RECORDING:
                torch.cuda.empty_cache()

    def _refuse_unreadable(self, token_ids: tuple[int, ...]) -> None:
        """Refuse token ids that the model does not have. Inside a batch, they would fail the other requests too."""
        if token_ids is self._readable:
            return
        for token_id in (min(token_ids, default=-1), max(token_ids, default=-1)):
            if not 0 <= token_id < self._vocabulary:
                what = f"token id {token_id} is not one of the model's {self._vocabulary}" if token_ids else "no tokens"
                raise BadRequestError(f"engine: a text to continue holds what the model cannot read: {what}")
        self._readable = token_ids

    def _nothing(self, sampling: Sampling) -> Completion:
        tokens_T, logp_T = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Completion(tokens_T, logp_T, ((0, self.held.version),), "length", self.held.lineage, sampling)

    def _submit(self, asked: Submission) -> None:
        """Pass a batch of requests to the engine's thread. The first request starts the thread."""
        if self._asking is asked:
            self._asking = None
        asked.seal()
        self._inbox.put(asked)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(weakref.ref(self), self._inbox), daemon=True, name="solera-engine"
            )
            weakref.finalize(self, self._inbox.put, None)
            self._thread.start()

    def write(self, active: list[Submission]) -> None:
        """Decode these requests, and those that arrive in the meantime."""
        owner = dict[Job, Submission]()
        with self._writing:
            while active:
                while not self._inbox.empty():
                    if (more := self._inbox.get()) is not None:
                        active.append(more)
                before = self._make_way()
                self._turn(active, owner, before)
                hand_out(active, self.early)
                active = [submission for submission in active if submission.pending]
            self.decoder.reset()  # it may still hold requests that were given up

    def _make_way(self) -> int | None:
        """Let new weights be loaded if some wait. Returns the version before them if jobs under way must continue."""
        loading = self._loading
        if loading is None or (loading.in_flight == "drain" and self.decoder.busy):
            return None
        before = self.held.version
        self._writing.release()
        loading.done.wait()
        self._writing.acquire()
        return before if self.decoder.busy else None

    def _turn(self, active: list[Submission], owner: dict[Job, Submission], before: int | None) -> None:
        """Admit what fits, and decode the next tokens. `before` is the version of jobs that the weights changed for."""
        start, prefilled, tokens = time.perf_counter(), self.decoder.prefilled, 0
        try:
            if cancelled := [job for submission in active for job in submission.drop_cancelled()]:
                with torch.cuda.stream(self._stream):
                    self.decoder.drop_cancelled()
                for job in cancelled:
                    owner.pop(job, None)
            if before is not None:
                self._continue(before)
            if self._loading is None or self._loading.in_flight != "drain":
                self._begin(active, owner)
            begun = time.perf_counter()
            for each in self._advance():
                tokens += len(each.token_ids_T)
                if (submission := owner.pop(each.job, None)) is not None:  # else it was cancelled when it had ended
                    submission.settle(each.job, self._completion(each))
        except Exception as error:  # handed to whoever waits, or they would wait for ever
            self.decoder.reset()
            for job, submission in owner.items():
                submission.settle(job, error)
            owner.clear()
            return
        end = time.perf_counter()
        self._work += Work(end - start, begun - start, self.decoder.prefilled - prefilled, tokens)

    def _begin(self, active: list[Submission], owner: dict[Job, Submission]) -> None:
        """Let the decoder begin with what waits, first come, first served. An idle decoder gets everything at once.
        Beside others, a batch begins as a whole or not at all. The rest of one that did not fit waits until the decoder
        is idle, so that it is decoded in the same parts every time."""
        waiting = sorted((each for each in active if each.waiting), key=Submission.is_long)
        if waiting and (not self.decoder.busy or (len(waiting) > 1 and not any(each.divided for each in waiting))):
            self._admit(waiting, owner)  # together: their prompts are then computed in one pass
            waiting = [each for each in waiting if each.waiting]
        for submission in waiting:
            if submission.divided or not self._admit([submission], owner):
                return

    def _continue(self, before: int) -> None:
        """Go on with the jobs under way. What they have so far was written by version `before`."""
        with torch.cuda.stream(self._stream), self._precision():
            for job, tokens in self.decoder.recompute().items():
                if tokens:
                    job.earlier.append((tokens, before))

    def _admit(self, submissions: list[Submission], owner: dict[Job, Submission]) -> int:
        """Admit jobs, and return how many. An error fails only these jobs; others continue."""
        of = {job: submission for submission in submissions for job in submission.waiting}
        jobs = list(of)
        try:
            with torch.cuda.stream(self._stream), self._precision():
                begun = self.decoder.admit(jobs)
        except Exception as error:
            for job in jobs:
                of[job].settle(job, error)
            begun, left = len(jobs), set[Job]()
        else:
            owner |= {job: of[job] for job in jobs[:begun]}
            left = set(jobs[begun:])
        for submission in submissions:
            before, submission.waiting = submission.waiting, [job for job in submission.waiting if job in left]
            submission.divided |= 0 < len(submission.waiting) < len(before)
        return begun

    def _advance(self) -> list[Written]:
        if not self.decoder.busy:
            return []
        try:
            with torch.cuda.stream(self._stream), self._precision():
                return self.decoder.advance()
        finally:
            self._count(self.decoder.sampled)

    def _completion(self, written: Written) -> Outcome:
        version = self.held.version
        if math.isnan(written.logp_T.dot(written.logp_T)):
            wider = WIDER.get(self.compute)
            return DivergedError(
                f"engine: with the weights of version {version} a log-probability is no number: they have diverged"
                + (f', or need model.compute = "{wider}"' if wider else "")
            )
        return Completion(
            written.token_ids_T, written.logp_T, written.job.versions(len(written.token_ids_T), version),
            "stop" if written.stopped else "length", self.held.lineage, written.job.sampling,
        )  # fmt: skip

    def _precision(self) -> AbstractContextManager[object]:
        """Autocast to lower precision if the weights are float32 master weights shared with the learner."""
        if self.compute == self.model.module.dtype:
            return nullcontext()
        return torch.autocast(self.model.device.type, self.compute)


def _serve(engine: "weakref.ref[InProcessEngine]", inbox: "SimpleQueue[Submission | None]") -> None:
    """The engine's thread: serves requests as long as the engine exists."""
    while (asked := inbox.get()) is not None:
        served = engine()
        if served is not None:
            served.write([asked])
        del served, asked  # an idle thread must not keep the model


def _decoder(
    model: LanguageModel,
    end_token_ids: tuple[int, ...],
    max_rows: int,
    compiled: bool,
    spell: Spell | None,
    keeps_memory: bool,
) -> Decoder:
    if not model.takes_plans:
        return PlainDecoder(model, end_token_ids, max_rows, spell)
    from solera.engines.continuous import ContinuousDecoder  # brings torch's compiler along, a second of every start

    return ContinuousDecoder(model, end_token_ids, max_rows, compiled=compiled, spell=spell, keeps_memory=keeps_memory)
