"""The requests of an engine in a Ray actor: the controller's side. `answering.py` is the other end.

Requests that are made before an event loop comes round travel in one call, which waits for nothing. Answers come back
through another call, of which one at a time is under way: it returns when there are answers, with all that are ready.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from solera.cluster.answers import Answers, Request, unpacked
from solera.cluster.sending import engine_errors
from solera.engines.faults import EngineError
from solera.engines.submission import set_outcome
from solera.protocols import Work
from solera.records import Completion, Sampling
from solera.tasks.event_loop import call_in


class Waiting(NamedTuple):
    """A request without an answer."""

    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Completion]"
    sampling: Sampling


@dataclass
class Outbox:
    """What the next call from an event loop tells the engine."""

    requests: dict[int, Request] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)


class Ended(NamedTuple):
    """A call that has returned or failed."""

    call: "futures.Future[Answers | None]"
    numbers: tuple[int, ...] | None
    """The requests that it carried. `None` if it called for answers: if that fails, all requests do."""


class Asking:
    """Asks the engine of `actor`, from any event loop. `learn` is told what the engine did so far, before its answers
    are handed out."""

    def __init__(self, actor: Any, place: str, timeout: float, learn: Callable[[int, Work], None]) -> None:
        self._actor, self._place, self._timeout, self._learn = actor, place, timeout, learn
        self._numbers = itertools.count()
        self._outboxes: dict[asyncio.AbstractEventLoop, Outbox] = {}
        """Each is used in the thread of its event loop only."""
        self._ended = SimpleQueue[Ended | None]()
        self._lock = threading.Lock()
        """Guards the fields below. Held while Ray is called: nobody calls it after `close`."""
        self._waiting: dict[int, Waiting] = {}
        self._fetching = False
        """Whether a call for answers is under way."""
        self._thread: threading.Thread | None = None
        self._closed = False

    async def ask(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer = loop.create_future()
        with self._lock:
            if self._closed:
                raise EngineError(f"closed ({self._place})")
            self._waiting[number] = Waiting(loop, answer, sampling)
        self._outbox(loop).requests[number] = (number, token_ids, sampling, seed)
        try:
            return await answer
        except asyncio.CancelledError:
            self._cancel(loop, number)
            raise

    def close(self) -> None:
        """Who still waits gets an error."""
        with self._lock:
            self._closed, left = True, tuple(self._waiting)
        self._settle(dict.fromkeys(left, EngineError(f"closed ({self._place})")))
        self._ended.put(None)

    def _outbox(self, loop: asyncio.AbstractEventLoop) -> Outbox:
        if loop not in self._outboxes:
            self._outboxes[loop] = Outbox()
            loop.call_soon(self._send, loop)  # runs after every task that is ready now has asked
        return self._outboxes[loop]

    def _cancel(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        with self._lock:
            unanswered = self._waiting.pop(number, None) is not None
        if unanswered:
            self._outbox(loop).cancelled.append(number)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        outbox = self._outboxes.pop(loop)
        with self._lock:
            requests = {number: each for number, each in outbox.requests.items() if number in self._waiting}
            if self._closed or not (requests or outbox.cancelled):
                return
            try:
                self._watch(self._actor.ask.remote(list(requests.values()), outbox.cancelled), tuple(requests))
                self._fetch()
                return
            except Exception as error:  # handed to whoever waits, or they would wait for ever
                failed = error
        self._settle(dict.fromkeys(requests, failed))

    def _fetch(self) -> None:
        """Call for answers, if somebody waits for one and no such call is under way. The lock is held."""
        if self._waiting and not self._fetching and not self._closed:
            self._watch(self._actor.answers.remote(), None)
            self._fetching = True

    def _watch(self, called: Any, numbers: tuple[int, ...] | None) -> None:
        """Let our thread look at a call when it has ended. Ray's own thread should not work for us."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="solera-answers")
            self._thread.start()
        called.future().add_done_callback(lambda call: self._ended.put(Ended(call, numbers)))

    def _serve(self) -> None:
        """The thread's function: hand out answers and errors until `close`."""
        while (ended := self._ended.get()) is not None:
            try:
                with engine_errors(self._place, self._timeout):
                    self._look_at(ended)
            except Exception as error:  # handed to whoever waits, or they would wait for ever
                with self._lock:
                    failed = tuple(self._waiting) if ended.numbers is None else ended.numbers
                self._settle(dict.fromkeys(failed, error))

    def _look_at(self, ended: Ended) -> None:
        if ended.numbers is None:
            with self._lock:
                self._fetching = False
        answers = ended.call.result()
        if answers is None:  # requests have arrived
            return
        with self._lock:
            samplings = {n: self._waiting[n].sampling for n in answers.numbers if n in self._waiting}
        self._learn(answers.sampled, answers.work)
        self._settle(unpacked(answers, samplings))
        with self._lock:
            self._fetch()

    def _settle(self, outcomes: Mapping[int, Completion | Exception]) -> None:
        """Hand out outcomes, each in the event loop that waits for it."""
        by_loop = dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion | Exception]]]()
        with self._lock:
            for number, outcome in outcomes.items():
                if (waiting := self._waiting.pop(number, None)) is not None:
                    by_loop.setdefault(waiting.loop, []).append((waiting.answer, outcome))
        for loop, answered in by_loop.items():
            call_in(loop, _set_all, answered)


def _set_all(answered: Iterable[tuple["asyncio.Future[Completion]", Completion | Exception]]) -> None:
    for answer, outcome in answered:
        set_outcome(answer, outcome)
