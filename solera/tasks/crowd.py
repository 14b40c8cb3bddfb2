"""Grade many responses at once in other processes.

On a GPU, hundreds of responses may end in the same moment, for example at the length limit. In lock-step the GPU then
waits for their grades. While streaming, grading needs Python's lock, which the thread that feeds the GPU needs too.
"""

import asyncio
import logging
import os
from collections.abc import Callable

from solera.errors import SoleraError, one_line
from solera.tasks.batching import Batcher
from solera.tasks.graders import GRADERS
from solera.tasks.judges import NoVerdictError, judges

SLOW = frozenset(("number",))
"""Graders that are worth it."""
CORES = 4
"""With fewer, generating and learning need them all."""
FEW = 32
"""Fewer responses are graded here: passing them on takes about as long."""
SHARE = 16
"""Fewest responses that are passed on together."""

UNABLE = NoVerdictError, SoleraError, OSError
"""A process died, did not start, or there is no memory for it."""

Asked = tuple[str, str, bool]
"""The text of a response, the expected answer, and whether the response is finished."""

log = logging.getLogger(__name__)


class Crowd:
    """A grader of `graders.py`. If many responses are to be graded in one turn of the event loop, several processes
    grade them side by side. These are started when that first happens. Until they run, all is graded here."""

    def __init__(self, grader: str) -> None:
        self.grader = grader
        self._judges = judges(__name__, None)
        self._grade_here = grader_of_all(grader)
        self._batcher = Batcher(self._grade_all)
        self._starting: asyncio.Task[bool] | None = None

    async def grade(self, asked: Asked) -> bool:
        return await self._batcher.ask(asked)

    async def _grade_all(self, asked: list[Asked]) -> list[bool]:
        if len(asked) < FEW or not self._running():
            return self._grade_here(asked)
        size = max(SHARE, -(-len(asked) // self._judges.count))
        shares = [asked[first : first + size] for first in range(0, len(asked), size)]
        return [verdict for some in await asyncio.gather(*map(self._grade_there, shares)) for verdict in some]

    def _running(self) -> bool:
        """Whether the processes run. They are started at the first call."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        return self._starting.done() and not self._starting.cancelled() and self._starting.result()

    async def _start(self) -> bool:
        try:
            await asyncio.gather(*(self._ask([]) for _ in range(self._judges.count)))
        except UNABLE as error:
            log.warning("solera: %s: responses are graded one after the other", one_line(error))
            return False
        return True

    async def _grade_there(self, asked: list[Asked]) -> list[bool]:
        try:
            return await self._ask(asked)
        except UNABLE:  # it was killed: the next question starts another one
            return self._grade_here(asked)

    async def _ask(self, asked: list[Asked]) -> list[bool]:
        return await self._judges.judge("grader_of_all", (self.grader,), (asked,), False)


def crowd_of(grader: str) -> Crowd | None:
    """If the grader takes long enough, and there are cores that the rest of a run does not need."""
    return Crowd(grader) if grader in SLOW and (os.cpu_count() or 1) >= CORES else None


def grader_of_all(grader: str) -> Callable[[list[Asked]], list[bool]]:
    grade = GRADERS[grader]
    return lambda asked: [grade(*each) for each in asked]


def prepare() -> None:
    """A process of `judge.py` calls this at its start. There is nothing to load."""
