"""The requests of an engine in a Ray actor: the actor's side. `asking.py` is the other end."""

import asyncio
from collections.abc import Sequence
from functools import partial

from solera.cluster.answers import Answers, Outcome, Request, packed
from solera.engines.faults import EngineError
from solera.engines.in_process import InProcessEngine
from solera.engines.vllm.client import VllmEngine
from solera.errors import SoleraError, one_line
from solera.records import Sampling

LINGER = 0.001
"""Seconds in which further answers may join the first one, if others are being written."""


class Answering:
    """Lets the engine write what was asked for, and keeps the outcomes until they are fetched. If it `frees`, the
    engine gives up its memory whenever it has nothing to write. All methods run in one event loop."""

    def __init__(self, engine: InProcessEngine | VllmEngine, frees: bool) -> None:
        self._engine = engine
        self._frees = frees
        self._writing: dict[int, asyncio.Task[None]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._some = asyncio.Event()
        """Whether there are outcomes."""
        self._early = set[int]()
        """Requests that were cancelled before they came: Ray may change the order of calls."""
        self._fetched = 0
        """How often answers were called for."""
        self._broken: EngineError | None = None
        """Why the engine keeps its memory. It is the outcome of all requests from then on, so that the pool sets the
        engine aside and opens it again."""

    def ask(self, requests: Sequence[Request], cancelled: Sequence[int]) -> None:
        """Begin with these requests, all before the event loop comes round, so that the engine gets them together."""
        for number, token_ids, sampling, seed in requests:
            if number in self._early:
                self._early.discard(number)
                continue
            task = self._writing[number] = asyncio.create_task(self._write(number, token_ids, sampling, seed))
            task.add_done_callback(partial(self._forget, number))
        for number in cancelled:
            if number in self._writing:
                self._writing[number].cancel()
            elif self._outcomes.pop(number, None) is None:
                self._early.add(number)

    async def answers(self) -> Answers:
        """Wait until there are outcomes, and return all of them."""
        self._fetched = call = self._fetched + 1
        await self._some.wait()
        if self._writing:
            await asyncio.sleep(LINGER)
        taken = dict[int, Outcome]()
        if call == self._fetched:  # the answer to an earlier call would reach nobody: its connection was lost
            taken, self._outcomes = self._outcomes, {}
            self._some.clear()
        return packed(taken, sampled_by(self._engine), self._engine.work)

    async def _write(self, number: int, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> None:
        try:
            outcome = await self._outcome(token_ids, sampling, seed)
        finally:
            self._writing.pop(number, None)
            await self._free()  # before the last answer, after which another process may take the memory
        self._outcomes[number] = self._broken or outcome
        self._some.set()

    async def _free(self) -> None:
        """Give up the engine's memory if it has nothing to write."""
        if not self._frees or self._writing or not isinstance(self._engine, InProcessEngine):
            return
        try:
            await asyncio.to_thread(self._engine.free)
        except Exception as error:  # told to whoever waits, or they would wait for ever
            self._broken = EngineError(f"could not free its memory: {type(error).__name__}: {one_line(error)}")

    def _forget(self, number: int, _: "asyncio.Task[None]") -> None:
        """A request that was cancelled before it began has ended, too."""
        self._writing.pop(number, None)

    async def _outcome(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Outcome:
        try:
            return await self._engine.generate(token_ids, sampling, seed)
        except SoleraError as error:
            return error
        except Exception as error:  # handed to whoever waits, or they would wait for ever
            return EngineError(f"{type(error).__name__}: {one_line(error)}")


def sampled_by(engine: InProcessEngine | VllmEngine) -> int:
    """What the engine has sampled so far, or, without asking a server, has returned."""
    return engine.sampled if isinstance(engine, InProcessEngine) else engine.work.tokens
