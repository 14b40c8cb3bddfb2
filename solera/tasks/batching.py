"""Answer questions together that are asked in one turn of the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Batcher(Generic[Question, Answer]):
    """Passes all questions of one turn of the event loop to `answer`, which returns their answers in order."""

    def __init__(self, answer: Callable[[list[Question]], Awaitable[list[Answer]]]) -> None:
        self._answer = answer
        self._asked: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._running = set[asyncio.Task[None]]()

    async def ask(self, question: Question) -> Answer:
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._begin)  # runs after every task that is ready now has asked
        waiting: asyncio.Future[Answer] = loop.create_future()
        self._asked.append((question, waiting))
        return await waiting

    def _begin(self) -> None:
        asked, self._asked = self._asked, []
        task = asyncio.get_running_loop().create_task(self._answer_all(asked))
        self._running.add(task)  # otherwise the event loop might let it be garbage-collected
        task.add_done_callback(self._running.discard)

    async def _answer_all(self, asked: "list[tuple[Question, asyncio.Future[Answer]]]") -> None:
        try:
            answers = await self._answer([question for question, _ in asked])
        except Exception as error:  # passed on to the waiting tasks, which would otherwise wait forever
            for _, waiting in asked:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        for (_, waiting), answer in zip(asked, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)
