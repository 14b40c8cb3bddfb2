"""Requests passed from an event loop to the engine's thread, and their results passed back."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from solera.engines.jobs import FEW, Job
from solera.records import Completion
from solera.tasks.event_loop import call_in

Outcome = Completion | Exception
Answer = tuple["asyncio.Future[Completion]", Outcome]


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
        self.some_cancelled = False
        """Set in the event loop's thread, after `Job.cancelled` of a job. The engine's thread need not look at all jobs
        to find out."""
        self._ready: list[Answer] = []
        """Results that have not been passed back yet."""

    def seal(self) -> None:
        """Close the submission. Jobs with the same sampling settings are decoded together, in order of appearance."""
        order = {kind: number for number, kind in enumerate(dict.fromkeys(job.kind for job in self.answers))}
        self.waiting = sorted(self.answers, key=lambda job: order[job.kind])
        self.pending = set(self.waiting)

    def drop_cancelled(self) -> list[Job]:
        """Forget jobs that were cancelled since the last call, and return those that had no result."""
        if not self.some_cancelled:
            return []
        self.some_cancelled = False  # first: one that is cancelled from now on is found next time
        cancelled = [job for job in self.pending if job.cancelled]
        self.pending.difference_update(cancelled)
        self.waiting = [job for job in self.waiting if job in self.pending]
        for job in cancelled:
            del self.answers[job]
        return cancelled

    def is_long(self) -> bool:
        """Whether it asks for more than a few tokens. Others go first: the proof of a sync waits for them."""
        return any(job.limit > FEW for job in self.waiting)

    def settle(self, job: Job, outcome: Outcome) -> None:
        self.pending.discard(job)
        self._ready.append((self.answers.pop(job), outcome))

    def take_ready(self, early: bool) -> list[Answer]:
        """Results to pass back now: those that have come (`early`), or all together."""
        if self.pending and not early:
            return []
        ready, self._ready = self._ready, []
        return ready


def hand_out(submissions: Iterable[Submission], early: bool) -> None:
    """Pass results back. Each event loop is woken once, which takes as long as setting many futures."""
    ready = defaultdict[asyncio.AbstractEventLoop, list[Answer]](list)
    for submission in submissions:
        ready[submission.loop] += submission.take_ready(early)
    for loop, answers in ready.items():
        if answers:
            call_in(loop, _set, answers)


def _set(answers: list[Answer]) -> None:
    """Runs in the event loop's thread."""
    for answer, outcome in answers:
        set_outcome(answer, outcome)


def set_outcome(answer: "asyncio.Future[Completion]", outcome: Outcome) -> None:
    """Hand an outcome to whoever waits for it, if it was not cancelled meanwhile."""
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
