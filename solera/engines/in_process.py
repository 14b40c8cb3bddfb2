"""The engine inside the training process: with weights of its own, so that a lag is real, or with the learner's."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from solera.engines.decoding import Decoded, decode
from solera.errors import BadRequestError, SoleraError
from solera.models.digest import describe, locate
from solera.models.extent import WIDER
from solera.models.language_model import LanguageModel
from solera.protocols import Weights
from solera.records import Completion, Manifest, Sampling
from solera.streams import uniforms

if TYPE_CHECKING:
    from solera.engines.continuous import ContinuousDecoder


Written = tuple[Items[int], list[Completion]]
"""Numbers of requests, and what was written for them."""


def refuse_too_long(prompt: int, limit: int, most: int | None) -> None:
    """A prompt of so many tokens, with the limit of its response, in a model of at most so many."""
    if most is not None and prompt + limit > most:
        raise SoleraError(
            f"a prompt of {prompt} tokens and sampling.max_tokens = {limit} do not fit the model's {most}: "
            + ("lower sampling.max_tokens" if prompt < most else "take a model with more")
        )


class Request(NamedTuple):
    """A text to continue, and who waits for it."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    answer: "asyncio.Future[Completion]"


def _continuous(
    model: LanguageModel, end_token_ids: tuple[int, ...], max_rows: int, compiled: bool
) -> "ContinuousDecoder":
    from solera.engines.continuous import ContinuousDecoder  # brings torch's compiler along, a second of every start

    return ContinuousDecoder(model, end_token_ids, max_rows, compiled=compiled)


class InProcessEngine:
    """Continues texts in batches: every request made before the event loop comes round again shares one, and all that
    come while it is written share the next.

    With `beside`, a GPU decodes in a stream of its own, which goes first: another thread's work there goes on
    meanwhile. A `shared` model has the learner's parameters for its own: it is always up to date, and a sync only
    changes the version. With `early`, who asked for a short response goes on while a GPU writes the others.
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
    ) -> None:
        self.model = model
        self.end_token_ids = end_token_ids
        self.max_rows = max_rows
        self.compute = compute
        self.shared = shared
        self.early = early
        self.dtype = str(model.module.dtype)
        self.held = Manifest(lineage="", version=0, tensors=())
        self._vocabulary: int = model.module.get_input_embeddings().num_embeddings
        self._readable: tuple[int, ...] = ()
        """The text that was looked at last: all members of a group have the same."""
        self._pending: list[Request] = []
        self._answering: asyncio.Task[None] | None = None
        self._continuous = _continuous(model, end_token_ids, max_rows, compiled) if model.takes_plans else None
        self._stream = torch.cuda.Stream(model.device, priority=-1) if beside and model.device.type == "cuda" else None

    def load(self, weights: Weights) -> Manifest:
        """Copy the tensors into the engine's own weights, but for those that are."""
        own = self.model.parameters()
        arrived = []
        with torch.no_grad():
            for name, tensor in weights.tensors:
                if name not in own or own[name].shape != tensor.shape:
                    raise SoleraError(f"engine: tensor {name} of shape {tuple(tensor.shape)} does not fit its model")
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
                arrived.append(name)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.model.device))
        specs = (locate if self.shared else describe)((name, own[name]) for name in arrived)
        self.held = Manifest(weights.lineage, weights.version, specs)
        return self.held

    def weights(self) -> Weights:
        own = {} if self.shared else self.model.parameters()
        return Weights(self.held.lineage, self.held.version, iter(own.items()))

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Continue one text, up to `sampling.max_tokens` or the end of the model's context; where the text fills it
        already, with nothing. Both are cut off: `finish_reason` is `length`."""
        self._refuse_unreadable(token_ids)
        if self.model.max_length is not None and len(token_ids) >= self.model.max_length:
            return self._nothing(sampling)
        loop = asyncio.get_running_loop()
        request = Request(token_ids, sampling, seed, loop.create_future())
        self._pending.append(request)
        if self._answering is None or self._answering.done():
            # Its first step comes after every task that is ready now has made its request.
            self._answering = loop.create_task(self._answer_pending())
            self._answering.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await request.answer

    def _refuse_unreadable(self, token_ids: tuple[int, ...]) -> None:
        """Here, since in a batch it would take the others with it."""
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

    async def _answer_pending(self) -> None:
        while self._pending:
            requests, self._pending = self._pending, []
            alike: dict[Sampling, list[Request]] = defaultdict(list)
            for request in requests:
                if not request.answer.done():  # given up, perhaps with the event loop that it came from
                    alike[request.sampling].append(request)
            for several in alike.values():
                together = len(several) if self._continuous else self.max_rows
                for start in range(0, len(several), together):
                    await self._answer(several[start : start + together])
            await asyncio.sleep(0)  # who was answered last may ask for more, as those answered earlier have

    async def _answer(self, requests: Items[Request]) -> None:
        """Give each what it waits for: with `early` when that is written, else when all is."""
        left, ready = len(requests), list[tuple[int, Completion]]()
        try:
            writing = self._write(requests)
            while left:
                rows, completions = self._next(writing)
                left -= len(rows)
                ready += zip(rows, completions, strict=True)
                if self.early or not left:
                    for b, completion in ready:
                        if not requests[b].answer.done():
                            requests[b].answer.set_result(completion)
                    ready.clear()
                if left:
                    await asyncio.sleep(0)
        except Exception as error:  # handed to whoever waits, or they would wait for ever
            for request in requests:
                if not request.answer.done():
                    request.answer.set_exception(error)

    def _next(self, writing: Iterator[Written]) -> Written:
        """Settings of this thread are only made here: between two calls others run in it."""
        with torch.cuda.stream(self._stream), self._precision():
            return next(writing)

    def _write(self, requests: Items[Request]) -> Iterator[Written]:
        """Which of the requests have ended, and what was written for them, until all have."""
        sampling = requests[0].sampling
        seed_B = np.array([request.seed for request in requests], np.uint64)
        texts, uniform_BT = [request.token_ids for request in requests], uniforms(seed_B, sampling.max_tokens)
        if self._continuous:
            for rows, decoded in self._continuous.decode(texts, uniform_BT, sampling):
                yield rows, self._completions(decoded, sampling)
        else:
            decoded = decode(self.model, texts, uniform_BT, sampling, self.end_token_ids)
            yield range(len(requests)), self._completions(decoded, sampling)

    def _completions(self, decoded: Decoded, sampling: Sampling) -> list[Completion]:
        lineage, version = self.held.lineage, self.held.version
        written_BT = np.arange(decoded.logp_BT.shape[1]) < decoded.length_B[:, None]
        if np.isnan(decoded.logp_BT[written_BT]).any():
            wider = WIDER.get(self.compute)
            raise SoleraError(
                f"engine: with the weights of version {version} a log-probability is no number: they have diverged"
                + (f', or need model.compute = "{wider}"' if wider else "")
            )
        return [
            Completion(
                decoded.token_BT[b, :length], decoded.logp_BT[b, :length], ((length, version),),
                "stop" if finished else "length", lineage, sampling,
            )
            for b, (length, finished) in enumerate(
                zip(decoded.length_B.tolist(), decoded.finished_B.tolist(), strict=True)
            )
        ]  # fmt: skip

    def _precision(self) -> AbstractContextManager[object]:
        """Lower precision by autocast where the weights are float32 masters shared with the learner."""
        if self.compute == self.model.module.dtype:
            return nullcontext()
        return torch.autocast(self.model.device.type, self.compute)
