"""Let the members of a group wait for each other, so that a reward can compare them."""

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context

_here: ContextVar["tuple[Company, int] | None"] = ContextVar("company", default=None)


class Company:
    """The attempts at one prompt that belong together. Each runs in a context of its own (`member`), and leaves when it
    has ended, so that nobody waits for an episode that failed."""

    def __init__(self) -> None:
        self._present: dict[int, Callable[[], None]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def member(self, number: int, pause: Callable[[], None] = lambda: None) -> Context:
        """The context for the task of a member. `pause` is called when the member begins to wait for the others. All
        members join before the first one runs."""
        self._present[number] = pause
        context = copy_context()
        context.run(_here.set, (self, number))
        return context

    def leave(self, number: int, _: object = None) -> None:
        del self._present[number]
        self._look()

    async def wait(self, number: int) -> None:
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._present[number]()
        self._look()
        await future

    def _look(self) -> None:
        if self._waiting.keys() >= self._present.keys():
            # Not at once: the one who comes last would go on before the others.
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():  # cancelled
                future.set_result(None)


async def together() -> object:
    """Wait until every other member of the group has come here, too, or has ended. Returns what identifies the group.

    All members go on in the same round of the event loop.
    """
    here = _here.get()
    if here is None:
        return object()
    company, number = here
    await company.wait(number)
    return company
