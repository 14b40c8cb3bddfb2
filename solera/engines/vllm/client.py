"""A vLLM server as an engine."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from solera.config import InFlight
from solera.engines.faults import DivergedError, GarbageError
from solera.engines.jobs import Spell, stop_at
from solera.engines.vllm.checks import Facts
from solera.engines.vllm.counter import TokenCounter
from solera.engines.vllm.http import Http
from solera.engines.vllm.launch import Launched
from solera.engines.vllm.updates import Updates, is_label
from solera.engines.vllm.versions import Answer, Release, sampling_params
from solera.errors import SoleraError
from solera.protocols import Weights, Work
from solera.records import Completion, FinishReason, Manifest, Sampling
from solera.streams import stream_seed
from solera.sync.proof import SyncFaultError, tolerance

PAUSE = {"drain": "wait", "keep": "keep", "abort": "abort"}
"""What vLLM calls the ways to treat requests in flight."""
IMPOSSIBLE = -9000.0
"""vLLM writes -9999 for a log-probability that is not a number."""
CACHE_TRIES = 5
"""How many tokens are drawn at most to check the prefix cache. Rounding may flip one of them."""


class VllmEngine:
    """Sends texts to one vLLM server, and weights through Solera's plugin inside it (`worker.py`).

    `generate` is awaited in the run's event loop. `load` is called from another thread and returns when the server
    holds the new weights. The server labels every token with the weights that wrote it. A completion that claims
    weights which this engine did not load is an error.
    """

    def __init__(
        self,
        http: Http,
        release: Release,
        facts: Facts,
        updates: Updates,
        counter: TokenCounter,
        *,
        end_token_ids: tuple[int, ...],
        spell: Spell,
        launched: Launched | None = None,
    ) -> None:
        self.http = http
        self.release = release
        self.facts = facts
        self.updates = updates
        self.end_token_ids = end_token_ids
        self.spell = spell
        self.launched = launched
        self.dtype = facts.dtype
        self.max_length = facts.max_length
        self.slots = facts.slots
        self.counter = counter
        self._counted = counter.total
        """What an earlier engine for this server has counted."""
        self.work = Work()
        self.held = Manifest(lineage="", version=0, tensors=())
        self._turn = threading.Condition()
        self._writing = 0
        """Requests in flight."""
        self._since = 0.0
        """When the first of them began."""
        self._draining = False

    # -- weights -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.held.version

    @property
    def sampled(self) -> int:
        """By the server's own counter, and at least what it has returned: a server may end before it is asked."""
        return max(self.counter.read() - self._counted, self.work.tokens)

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        """Send the weights. The server checks them before it touches its model. If it refuses them, the old weights go
        on serving and a `SyncFaultError` says why."""
        if in_flight not in self.release.in_flight:
            known = " or ".join(self.release.in_flight)
            raise SoleraError(f"sync.in_flight is {in_flight}, which this release of vLLM cannot do: use {known}")
        offer = self.updates.offer(weights)
        with self._paused(in_flight):
            self.held = self.updates.apply(offer)
        self.counter.belongs_to(weights.lineage)
        start = time.perf_counter()
        self._check_cache(weights.version)
        self.work += Work(digesting=offer.digesting + time.perf_counter() - start)
        return self.held

    def weights(self) -> Weights:
        """The last weights that the server accepted, from the copy that the transport keeps."""
        return Weights(self.held.lineage, self.held.version, self.updates.transport.kept())

    @contextmanager
    def _paused(self, in_flight: InFlight) -> Iterator[None]:
        """Stop the server between two tokens. Pausing also empties its prefix cache. It stays paused if an update fails
        half-way: it would label what it writes with weights that it does not hold. Connecting again resumes it."""
        with self._drained(in_flight == "drain"):
            self.http.post(f"/pause?mode={PAUSE[in_flight]}")
            try:
                yield
            except BaseException:
                if self.updates.untouched():
                    self.http.post("/resume")
                raise
            self.http.post("/resume")

    @contextmanager
    def _drained(self, needed: bool) -> Iterator[None]:
        """Hold new requests back until the weights are loaded, and wait for those in flight."""
        if not needed:
            yield
            return
        with self._turn:
            self._draining = True
            self._turn.wait_for(lambda: self._writing == 0)
        try:
            yield
        finally:
            self._draining = False

    def _check_cache(self, version: int) -> None:
        """Continue a text that was also continued after the last sync: once with the prefix cache, once without. If the
        cache still held keys and values of the old weights, the log-probabilities would differ. In 16 bits, about 1 %
        of the tokens differ by rounding, because other requests are computed at the same time: then draw others."""
        tokens, block = self.max_length - 2, self.facts.block
        if block is None or tokens <= block:
            return  # nothing this short is ever cached
        text = tuple(1 + number % (self.facts.vocabulary - 1) for number in range(min(tokens, 2 * block + 1)))
        drawn = (self._cache_apart(text, seed) for seed in range(CACHE_TRIES))
        apart = next(filter(math.isfinite, drawn), math.inf)
        if not apart <= tolerance(self.dtype, 1.0):
            raise SyncFaultError(
                f"sync of version {version}: vLLM server {self.http.url}: its prefix cache still holds older weights "
                f"(log-probabilities with and without it differ by {apart:.2g})"
            )

    def _cache_apart(self, text: tuple[int, ...], seed: int) -> float:
        """How far log-probabilities with and without the prefix cache are apart; infinite if the tokens differ."""
        params = sampling_params(Sampling(1.0, 1), 1, seed, ())
        bodies = [self.release.body(self.facts.name, text, params, salt) for salt in (None, f"{time.time_ns()}")]
        cached, fresh = (self.release.answer(self.http.post(self.release.path, body)) for body in bodies)
        self.counter.exclude(len(cached.token_ids) + len(fresh.token_ids))
        for answer in (cached, fresh):
            if answer.spans is not None:
                self._versions(answer)  # another trainer may have sent its weights in between
        return abs(cached.logp[0] - fresh.logp[0]) if cached.token_ids == fresh.token_ids else math.inf

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Continue one text, up to `sampling.max_tokens` or the end of the model's context. A request that a sync
        aborts is sent again with what was written so far."""
        limit = min(sampling.max_tokens, self.max_length - len(token_ids))
        ids, logp, spans = list[int](), list[float](), list[tuple[int, int]]()
        reason = "abort" if limit > 0 else "length"
        while reason == "abort":
            params = sampling_params(
                sampling, limit - len(ids), stream_seed(seed, len(ids)) if ids else seed, self.end_token_ids
            )
            answer = await self._ask((*token_ids, *ids), params)
            ids += answer.token_ids
            logp += answer.logp
            spans += self._versions(answer)
            reason = "stop" if ids and ids[-1] in self.end_token_ids else answer.finish_reason
            if reason == "abort" and len(ids) == limit:
                reason = "length"
        return self._completion(ids, logp, spans, reason, sampling)

    async def _ask(self, token_ids: tuple[int, ...], params: dict[str, Any]) -> Answer:
        body = self.release.body(self.facts.name, token_ids, params, None)
        await self._enter()
        tokens = 0
        try:
            answer = self._read(await self.http.post_awaited(self.release.path, body), params["max_tokens"])
            tokens = len(answer.token_ids)
            if answer.spans is None:
                return answer._replace(spans=[(self.updates.finished or "", tokens)])
            return answer
        finally:
            self._leave(tokens)

    def _read(self, said: Any, limit: int) -> Answer:
        """The answer in a response. Refuses one that cannot be right."""
        try:
            answer = self.release.answer(said)
            ids, logp = [int(each) for each in answer.token_ids], [float(each) for each in answer.logp]
        except (LookupError, TypeError, ValueError) as error:
            raise GarbageError(
                f"vLLM server {self.http.url} answered in an unknown form ({type(error).__name__}: {error})"
            ) from error
        if len(ids) != len(logp) or len(ids) > limit:
            raise GarbageError(
                f"vLLM server {self.http.url} returned {len(ids)} tokens and {len(logp)} log-probabilities, at most "
                f"{limit} were asked for"
            )
        if unknown := [each for each in ids if not 0 <= each < self.facts.vocabulary]:
            raise GarbageError(
                f"vLLM server {self.http.url} returned token {unknown[0]}; the model has {self.facts.vocabulary}"
            )
        return answer._replace(token_ids=ids, logp=logp)

    async def _enter(self) -> None:
        while True:
            with self._turn:
                if not self._draining:
                    self._since = self._since if self._writing else time.perf_counter()
                    self._writing += 1
                    return
            await asyncio.sleep(0.01)

    def _leave(self, tokens: int) -> None:
        with self._turn:
            self._writing -= 1
            seconds = 0.0 if self._writing else time.perf_counter() - self._since
            self.work += Work(seconds=seconds, tokens=tokens)
            self._turn.notify_all()

    def _versions(self, answer: Answer) -> list[tuple[int, int]]:
        """The version of each run of tokens. Refuses weights that this engine did not load."""
        found = []
        for label, count in answer.spans or ():
            if label not in self.updates.labels:
                if is_label(label):
                    raise self.updates.taken(label)
                raise GarbageError(
                    f"vLLM server {self.http.url} generated with weights that this run did not send ({label!r}): it "
                    "was started again, or somebody else has changed them"
                )
            found.append((count, self.updates.labels[label][1]))
        if sum(count for count, _ in found) != len(answer.token_ids):
            raise GarbageError(f"vLLM server {self.http.url} did not say which weights wrote every token")
        return found

    def _completion(
        self, ids: list[int], logp: list[float], spans: list[tuple[int, int]], reason: str, sampling: Sampling
    ) -> Completion:
        if reason not in ("stop", "length"):
            raise GarbageError(f"vLLM server {self.http.url} ended a response with {reason!r}")
        ids_T = np.array(ids, np.int32)
        if sampling.stop and (end := stop_at(ids_T, 0, sampling.stop, self.spell)) is not None:
            ids_T, reason = ids_T[:end], "stop"
        logp_T = np.array(logp[: len(ids_T)], np.float32)
        if sampling.temperature == 0.0:
            logp_T = np.zeros_like(logp_T)  # greedy: the token is certain
        if len(logp_T) and logp_T.min() < IMPOSSIBLE:
            raise DivergedError(
                f"engine: with the weights of version {self.held.version} a log-probability is no number: they have "
                "diverged"
            )
        versions = _cut(spans, len(ids_T)) or ((0, self.held.version),)
        ended: FinishReason = "stop" if reason == "stop" else "length"
        return Completion(ids_T, logp_T, versions, ended, self.held.lineage, sampling)

    def close(self) -> None:
        """Close the connections, remove what was sent, and stop the server if this engine started it."""
        self.http.close()
        self.updates.transport.close()
        if self.launched is not None:
            self.launched.close()


def _cut(spans: list[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """The spans of the first `length` tokens, with neighbours of one version as one span.

    >>> _cut([(2, 7), (1, 7), (4, 8)], 5)
    ((3, 7), (2, 8))
    """
    cut = list[tuple[int, int]]()
    for count, version in spans:
        taken = min(count, length)
        length -= taken
        if cut and cut[-1][1] == version:
            cut[-1] = (cut[-1][0] + taken, version)
        elif taken:
            cut.append((taken, version))
    return tuple(cut)
