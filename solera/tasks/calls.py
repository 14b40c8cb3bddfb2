"""Call functions that may hang, raise or block, without waiting for them forever.

Calls run in a daemon thread, because Python cannot stop a thread, but a daemon thread does not keep the process alive.
A call that never ends is left behind with its thread, and later calls use a new thread.
"""

import _thread
import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from solera.tasks.event_loop import call_in

Call = tuple[tuple[Any, ...], dict[str, Any]]
GRACE = 1.0
"""Extra seconds for a thread of asynchronous calls to report its timeouts."""


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or the error it raised."""

    value: Any = None
    error: BaseException | None = None


class TookTooLongError(Exception):
    """A call was still running when its time was up."""


Answers = list["asyncio.Future[Outcome]"]
Tell = Callable[["asyncio.Future[Outcome]", Outcome], None]


async def call_each(function: Callable[..., Any], calls: list[Call], timeout: float) -> AsyncGenerator[Outcome, None]:
    """Yield the outcome of every call, with `timeout` seconds each. Asynchronous functions run together, others one
    after the other.

    Closing the generator after an outcome prevents further calls.
    """
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    patience = timeout + GRACE if asynchronous else timeout
    made = 0
    while made < len(calls):
        answers = _start(_together if asynchronous else _in_turn, function, calls[made:], timeout)
        try:
            for answer in answers:
                if not answer.done():
                    await asyncio.wait([answer], timeout=patience)
                made, late = made + 1, not answer.done()
                yield Outcome(error=TookTooLongError()) if late else answer.result()
                if late:
                    break
        finally:
            for answer in answers:
                answer.cancel()


def _start(work: Callable[..., None], function: Callable[..., Any], calls: list[Call], timeout: float) -> Answers:
    loop = asyncio.get_running_loop()
    answers: Answers = [loop.create_future() for _ in calls]

    def tell(answer: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
        call_in(loop, lambda: None if answer.done() else answer.set_result(outcome))

    arguments = (function, list(zip(calls, answers, strict=True)), timeout, tell)
    # `threading.Thread.start` would wait here until the thread runs. Threads of this kind are daemons, too.
    _thread.start_new_thread(work, arguments)
    return answers


def _in_turn(function: Callable[..., Any], jobs: list[tuple[Call, Any]], _: float, tell: Tell) -> None:
    for (arguments, keywords), answer in jobs:
        if answer.cancelled():
            return
        try:
            outcome = Outcome(function(*arguments, **keywords))
        except BaseException as error:
            outcome = Outcome(error=error)
        tell(answer, outcome)


def _together(function: Callable[..., Any], jobs: list[tuple[Call, Any]], timeout: float, tell: Tell) -> None:
    async def one(call: Call, answer: "asyncio.Future[Outcome]") -> None:
        try:
            tell(answer, Outcome(await function(*call[0], **call[1])))
        except BaseException as error:
            tell(answer, Outcome(error=error))

    async def together() -> None:
        running = {asyncio.ensure_future(one(*job)): job[1] for job in jobs}
        _, late = await asyncio.wait(running, timeout=timeout)
        for task in late:
            tell(running[task], Outcome(error=TookTooLongError()))

    asyncio.run(together())
