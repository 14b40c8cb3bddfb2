"""Lets episodes advance in rounds, so that what is decoded together does not depend on how long tools take."""

import asyncio
from dataclasses import dataclass

from solera.protocols import Engine
from solera.records import Completion, Sampling


class Rounds:
    """Holds requests back until every running episode waits for the engine, that is, until no tool is running. Then all
    are made at once, in the order of the episodes. So each batch has the same requests in every run."""

    def __init__(self, engine: Engine, episodes: int) -> None:
        self.engine = engine
        self._running = set(range(episodes))
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._writing = 0

    def seat(self, number: int) -> "Seat":
        """The engine as episode `number` sees it."""
        return Seat(self, number)

    def end(self, number: int, _: object = None) -> None:
        """Report that episode `number` has ended, failed or was cancelled."""
        self._running.discard(number)
        self._look()

    async def generate(self, number: int, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((number, turn))
        self._look()
        try:
            await turn
            return await self.engine.generate(token_ids, sampling, seed)
        finally:
            self._writing -= turn.done() and not turn.cancelled()
            self._look()

    def _look(self) -> None:
        if len(self._waiting) >= max(1, len(self._running)) and self._all_wait():
            # Not at once: an episode may be about to make a second request beside its first.
            asyncio.get_running_loop().call_soon(self._begin)

    def _all_wait(self) -> bool:
        return not self._writing and self._running <= {number for number, turn in self._waiting if not turn.done()}

    def _begin(self) -> None:
        if not self._all_wait():
            return
        waiting, self._waiting = self._waiting, []
        for _, turn in sorted(waiting, key=lambda each: each[0]):
            if not turn.done():  # cancelled
                self._writing += 1
                turn.set_result(None)


@dataclass(frozen=True)
class Seat:
    """One episode's place in the rounds."""

    rounds: Rounds
    number: int

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        return await self.rounds.generate(self.number, token_ids, sampling, seed)
