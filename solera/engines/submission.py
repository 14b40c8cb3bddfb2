"""Requests passed from an event loop to the engine's thread, and their results passed back."""

import asyncio

from solera.engines.jobs import FEW, Job
from solera.records import Completion
from solera.tasks.event_loop import call_in

Outcome = Completion | Exception


class Submission:
    """Jobs that were requested together, and the future of each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.answers: dict[Job, asyncio.Future[Completion]] = {}
        self.waiting: list[Job] = []
        """Jobs that the decoder has not admitted yet."""
        self.divided = False
        """Whether the decoder admitted only some of them."""
        self.pending: set[Job] = set()
        """Jobs without a result."""
        self.ready: list[tuple[Job, Outcome]] = []
        """Results that have not been passed back yet."""

    def seal(self) -> None:
        """Close the submission. Jobs with the same sampling settings are decoded together, in order of appearance."""
        order = {kind: number for number, kind in enumerate(dict.fromkeys(job.kind for job in self.answers))}
        self.waiting = sorted(self.answers, key=lambda job: order[job.kind])
        self.pending = set(self.waiting)

    def still_waiting(self) -> bool:
        """Whether jobs wait for admission. Cancelled ones are dropped."""
        self.waiting = [job for job in self.waiting if not job.cancelled]
        return bool(self.waiting)

    def is_long(self) -> bool:
        """Whether it asks for more than a few tokens. Others go first: the proof of a sync waits for them."""
        return any(job.limit > FEW for job in self.waiting)

    def settle(self, job: Job, outcome: Outcome) -> None:
        self.pending.discard(job)
        self.ready.append((job, outcome))

    def hand_out(self, early: bool) -> None:
        """Pass results back: as they come (`early`), or all together."""
        if self.pending and any(job.cancelled for job in self.pending):
            self.pending = {job for job in self.pending if not job.cancelled}
        if not self.ready or (self.pending and not early):
            return
        ready, self.ready = self.ready, []
        call_in(self.loop, self._set, ready)

    def _set(self, outcomes: list[tuple[Job, Outcome]]) -> None:
        """Set the futures. Runs in the event loop's thread."""
        for job, outcome in outcomes:
            set_outcome(self.answers.pop(job), outcome)


def set_outcome(answer: "asyncio.Future[Completion]", outcome: Outcome) -> None:
    """Hand an outcome to whoever waits for it, if it was not cancelled meanwhile."""
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
