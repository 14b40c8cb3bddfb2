"""One engine of a pool: its requests, each with a time limit, and checks of what it answers."""

import asyncio
from collections.abc import Callable, Container
from typing import Literal, NamedTuple

import numpy as np

from solera.engines.faults import EngineError, GarbageError
from solera.errors import SoleraError, one_line
from solera.protocols import Engine
from solera.records import Completion, PolicyVersion, Sampling

State = Literal["serving", "suspected", "aside"]
REMEMBERED = 2000
"""An answer may claim only the weights of so many syncs, the latest ones. A request can be under way during many."""


class Opened(NamedTuple):
    """An engine, and the name by which messages call it."""

    name: str
    engine: Engine
    ahead: int = 0
    """Requests that it is given beyond its slots. They wait there, and take a slot as soon as it is free."""


Open = Callable[[], Opened]
"""Starts an engine, or connects to one that runs."""


class Witness(NamedTuple):
    """A request, and an answer to it that the learner has confirmed."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    completion: Completion | None = None

    def apart(self, other: Completion) -> float | None:
        """Mean difference of the log-probabilities of the tokens that both answers begin with; `None` if there are
        none."""
        assert self.completion is not None, "a request without an answer"
        one, tokens = self.completion, min(len(self.completion.token_ids_T), len(other.token_ids_T))
        unlike_T = np.flatnonzero(one.token_ids_T[:tokens] != other.token_ids_T[:tokens])
        same = int(unlike_T[0]) if len(unlike_T) else tokens
        return float(np.abs(one.behaviour_logp_T[:same] - other.behaviour_logp_T[:same]).mean()) if same else None


class Member:
    """An engine and what the pool knows about it. The pool changes its fields, with its lock held."""

    def __init__(self, number: int, opened: Opened, timeout: float) -> None:
        self.number = number
        self.name, self.engine, self.ahead = opened
        self.timeout = timeout
        self.state: State = "serving"
        self.fault = ""
        """Why it was set aside last, or could not be brought back."""
        self.since = 0.0
        """When it was set aside last."""
        self.lost = False
        """Whether the run no longer waits for it."""
        self.doubted = False
        """Whether a sync has failed for it and is not over: nobody knows what it writes with."""
        self.waiting = 0
        """Requests that it has not answered yet."""
        self.tokens = self.set_aside = self.restarts = self.retries = 0
        """Counted since the run began, or since it was resumed."""
        self.authors: Container[PolicyVersion] = ()
        """The weights that it may write with in `generate`."""
        self.witnesses = dict[tuple[tuple[int, ...], int], Witness]()
        """What `generate` was asked last."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which it was asked last."""
        self._running = set[asyncio.Task[Completion]]()

    @property
    def dtype(self) -> str:
        return self.engine.dtype

    @property
    def limit(self) -> int:
        """How many requests it gets at once. More would wait there, where nobody else can take them."""
        return 0 if self.doubted else max(1, self.engine.slots + self.ahead)

    @property
    def busy(self) -> float:
        """The share of its slots that are taken."""
        return self.waiting / self.limit

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Continue one text on this engine and no other: for a proof."""
        completion = await self.ask(token_ids, sampling, seed, lambda: self.authors)
        self.witnesses[token_ids, seed] = Witness(token_ids, sampling, seed, completion)
        return completion

    async def ask(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        authors: Callable[[], Container[PolicyVersion]],
        timeout: float | None = None,
    ) -> Completion:
        """Continue one text. Refuses an answer that is late, has the wrong form, or was not written by `authors`."""
        limit, self.loop = timeout or self.timeout, asyncio.get_running_loop()
        task = self.loop.create_task(self.engine.generate(token_ids, sampling, seed))
        task.add_done_callback(_look_at_error)
        self._running.add(task)
        try:
            await asyncio.wait({task}, timeout=limit)
            if not task.done():
                raise EngineError(f"{self.name}: no answer within {limit:g} s (engine.timeout)")
            if task.cancelled():
                raise EngineError(f"{self.name}: was set aside before it answered")
            try:
                completion = self._checked(task.result(), sampling, authors())
            except SoleraError:
                raise
            except Exception as error:
                raise EngineError(f"{self.name}: {said_by(self.name, error)}") from error
            self.tokens += len(completion.token_ids_T)
            return completion
        finally:
            task.cancel()
            self._running.discard(task)

    def drop_requests(self) -> None:
        """Give up what it has not answered, so that others answer it. Called in the event loop's thread."""
        for task in list(self._running):
            task.cancel()

    def _checked(self, completion: Completion, sampling: Sampling, authors: Container[PolicyVersion]) -> Completion:
        tokens, logps = len(completion.token_ids_T), len(completion.behaviour_logp_T)
        written = sum(count for count, _ in completion.versions)
        if not tokens == logps == written or tokens > sampling.max_tokens:
            raise GarbageError(
                f"{self.name}: its answer has {tokens} tokens, {logps} log-probabilities and versions for {written}, "
                f"at most {sampling.max_tokens} were asked for"
            )
        for _, version in completion.versions:
            if PolicyVersion(completion.lineage or "", version) not in authors:
                raise GarbageError(f"{self.name}: it wrote with version {version}, which it should not hold")
        return completion


def _look_at_error(task: "asyncio.Task[Completion]") -> None:
    """An error of a request that nobody waits for any more is no news."""
    if not task.cancelled():
        task.exception()


def said_by(name: str, error: Exception) -> str:
    """An engine's error in one line, without the engine's name."""
    said = one_line(error, 600) if isinstance(error, SoleraError) else f"{type(error).__name__}: {one_line(error)}"
    return said.removeprefix(name).removeprefix(":").strip()
