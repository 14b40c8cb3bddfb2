"""Requests on their way from an event loop to the engine's thread, and their answers on the way back."""

import asyncio

from solera.engines.jobs import Job
from solera.records import Completion

Outcome = Completion | Exception


class Submission:
    """Jobs that were asked for together, and who waits for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.answers: dict[Job, asyncio.Future[Completion]] = {}
        self.waiting: list[Job] = []
        """Jobs that the decoder has not begun."""
        self.divided = False
        """Whether the decoder has begun with some of them and had no room for the rest."""
        self.pending: set[Job] = set()
        """Jobs without an outcome."""
        self.ready: list[tuple[Job, Outcome]] = []
        """Outcomes that are not handed out yet."""

    def seal(self) -> None:
        """Everyone has asked. Jobs that are sampled alike are decoded together, the first kind first."""
        order = {kind: number for number, kind in enumerate(dict.fromkeys(job.kind for job in self.answers))}
        self.waiting = sorted(self.answers, key=lambda job: order[job.kind])
        self.pending = set(self.waiting)

    def still_waiting(self) -> bool:
        """Whether the decoder has jobs to begin with; those that were given up are none."""
        self.waiting = [job for job in self.waiting if not job.cancelled]
        return bool(self.waiting)

    def settle(self, job: Job, outcome: Outcome) -> None:
        self.pending.discard(job)
        self.ready.append((job, outcome))

    def hand_out(self, early: bool) -> None:
        """Give outcomes to those who wait: as they come, or all together."""
        if self.pending and any(job.cancelled for job in self.pending):
            self.pending = {job for job in self.pending if not job.cancelled}
        if not self.ready or (self.pending and not early):
            return
        ready, self.ready = self.ready, []
        try:
            self.loop.call_soon_threadsafe(self._set, ready)
        except RuntimeError:  # the event loop is closed: nobody waits any more
            if not self.loop.is_closed():
                raise

    def _set(self, outcomes: list[tuple[Job, Outcome]]) -> None:
        """In the thread of those who wait."""
        for job, outcome in outcomes:
            answer = self.answers.pop(job)
            if answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
