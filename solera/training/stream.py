"""A supply that generates all the time, while the learner learns, and still bounds the age of what is trained on.

Prompts are admitted in the order of the task's stream, one group of attempts each, as long as every admitted group will
be drawn in time. With version e of the engine, n batches handed to the learner, and at least B new groups per batch, a
group is admitted while fewer than

    need + (e + max_age - n) · B

groups are open, where `need` is the number of new groups that batch n takes. A group is open from its admission until
it is drawn, or closed because it cannot be drawn. A closed group is never drawn as a new one, even if its rewards come
later: another was admitted in its place. Batches take open groups in the order of their admission and wait for slow
ones. So a group is drawn by batch e + max_age at the latest. Version e or a later one wrote its first token, so
its age is at most `max_age`. Nothing is ever dropped for its age: dropping late responses would starve long, hard
prompts.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from solera.protocols import Engine, OrderedStore, SupplyState, Task
from solera.records import Group, PolicyVersion, Prompt, Sampling
from solera.tasks.company import Company
from solera.tasks.episodes import Attempted, Guard, all_or_first_error, attempt
from solera.tasks.event_loop import EventLoop
from solera.training.supply import ROUNDS, Outcomes, attempt_seeds, grading_metrics, stored

UNBOUNDED = 2
"""Batches generated ahead if nothing bounds the age (`sync.rule = "never"`)."""
LEAD = 4
"""Batches that are ready to be drawn when the engine pauses. Writing more would only make the data older. With fewer, a
fast learner has drawn them all before the first new responses end, and waits. A group behind one that is still being
written does not count as ready, so a slow response does not stop the engine."""
MORE_LEAD, MOST_LEAD = 2, 8
"""By how many batches the lead grows, and up to what, each time that the learner waits although the engine stood still.
Then the first new responses end late: a large engine begins with all of its slots at once."""
OVERSUBSCRIBED = 1.25
"""Attempts under way for each of the engine's slots. Those that wait take the slots of finished ones at once."""
FREE_SHARE = 8
"""New groups are admitted once one in so many attempts has ended. Their prompts are computed together."""


@dataclass(eq=False)
class OpenGroup:
    """A group from its admission until it is drawn or closed (left out because it cannot be drawn)."""

    admitted: float
    """When it was admitted, in seconds of `time.perf_counter`."""
    attempted: list[Attempted] | None = None
    """Its attempts, from the end of the last one until they are stored."""
    ended: float | None = None
    """When the last attempt ended."""
    graded: bool = True
    """Whether every member has a reward."""

    @property
    def stored(self) -> bool:
        return self.ended is not None and self.attempted is None


class Waited(NamedTuple):
    """How long a group that was drawn had taken."""

    writing: float
    """Seconds from its admission to the end of its last response."""
    waiting: float
    """Seconds from then until it was drawn."""
    length: float
    """Mean length of its responses."""
    reward: float
    """Their mean reward."""


class Stream:
    """A `Supply` that keeps the engine full. Episodes run in the thread of the run's event loop. Only the main thread
    uses the store.

    `new_per_batch` is the smallest number of new groups that a batch takes. At `max_age = 0` nothing is written while
    the learner works, and replacements for groups that cannot be drawn wait until the others are complete. So a
    single-turn run equals the one in lock-step, bit for bit.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        store: OrderedStore,
        *,
        sampling: Sampling,
        group_size: int,
        members: int,
        new_per_batch: int,
        max_age: float,
        seed: int,
        guard: Guard,
        events: EventLoop,
    ) -> None:
        self.task = task
        self.engine = engine
        self.store = store
        self.sampling = sampling
        self.group_size = group_size
        self.members = members
        self.new_per_batch = new_per_batch
        self.max_age = max_age
        self.seed = seed
        self.guard = guard
        self.events = events
        self.position = 0
        """Next problem of the task's stream."""
        self._again: list[int] = []
        """Problems to attempt first. They were under way when the run was interrupted that this one resumes."""
        self._open: dict[int, OpenGroup] = {}
        """By admission, which is the problem's position in the stream."""
        self._last_version = -1
        """Of the engine, when groups were admitted last."""
        self._next_batch = 0
        self._need = 0
        """New groups that the next batch takes."""
        self._gives_up = False
        """Whether the next batch takes what is open, although it is less. Nothing more is admitted until it is drawn:
        the bound counts on every batch to leave no more open groups than the batches after it take."""
        self._error: BaseException | None = None
        self._tasks = set[asyncio.Task[None]]()
        """Kept, because an event loop holds its tasks only weakly."""
        self._changed = threading.Condition()
        """Guards the fields above. The event loop's thread admits groups and ends attempts. The main thread stores and
        draws."""
        self._running = 0
        """Attempts under way. Only the event loop's thread uses this and the next field."""
        self._will_admit = False
        """Whether groups are about to be admitted, because attempts have ended."""
        self._lead = LEAD
        self._stood_still = False
        """Whether the engine has had nothing to write, because enough was ready, since the learner waited last."""
        self._outcomes = Outcomes()
        self._closed = Counter[str]()
        self._waited: list[Waited] = []
        self._worked = engine.work
        self._generated = 0
        """Tokens that were stored with a checkpoint, for the next batch to count."""

    def wait(self, groups: int, now: PolicyVersion) -> int:
        """Return once `groups` groups can be drawn, the earliest admitted first. Returns the tokens of all groups that
        were stored meanwhile.

        If many groups cannot be drawn, because they have no reward or the store filters them out, no others take their
        place, and it returns with less.
        """
        generated, waves, closed = self._generated + self._store_ended(), 0, 0
        self._generated = 0
        with self._changed:
            self._next_batch, self._gives_up = now.version, False
        while True:
            need, ready = self.store.supplied(groups, self.group_size, now)
            closed += self._close_all_but(ready)
            with self._changed:
                self._gives_up = closed > ROUNDS * groups or (self.max_age == 0 and waves >= ROUNDS)
            if self._ready(need):
                return generated
            with self._changed:
                self._need = need
            waves += self.events.run(self._admit_some()) > 0
            self.store.flush()
            if not self._ready(need):
                self._note_that_the_learner_waits()
            while not self._ready(need):
                with self._changed:
                    self._changed.wait_for(self._anything_to_store)
                generated += self._store_ended()

    def _note_that_the_learner_waits(self) -> None:
        with self._changed:
            if self._stood_still:
                self._lead = min(self._lead + MORE_LEAD, MOST_LEAD)
            self._stood_still = False

    def _close_all_but(self, ready: Collection[int]) -> int:
        """Close the groups that were stored and cannot be drawn. Returns their number."""
        with self._changed:
            numbers = [number for number, group in self._open.items() if group.stored and number not in ready]
            for number in numbers:
                self._close(number)
        if numbers:
            self.store.leave_out(numbers)
        return len(numbers)

    def _close(self, number: int) -> None:
        group = self._open.pop(number)
        self._closed["filtered" if group.graded else "ungraded"] += 1

    def _ready(self, need: int) -> bool:
        """Whether the first `need` groups in the order of admission are stored, or all, if no others come."""
        with self._changed:
            first = [self._open.get(number) for number in self._in_order()[:need]]
            enough = len(first) == need or self._gives_up
            return enough and all(group is not None and group.stored for group in first)

    def _in_order(self) -> list[int]:
        """The open groups, and those that will be attempted again, in the order of their first admission."""
        return sorted({*self._open, *self._again})

    def _anything_to_store(self) -> bool:
        return self._error is not None or bool(self._to_store())

    def _to_store(self) -> dict[int, OpenGroup]:
        """The groups that have ended. At `max_age = 0` only all together: replay depends on the order in the store."""
        waiting = {number: group for number, group in sorted(self._open.items()) if not group.stored}
        ended = {number: group for number, group in waiting.items() if group.attempted is not None}
        return ended if self.max_age or len(ended) == len(waiting) else {}

    def _store_ended(self) -> int:
        """Store the groups that have ended. Returns how many tokens were generated for them."""
        with self._changed:
            if self._error is not None:
                raise self._error
            ended = self._to_store()
            attempted = {n: group.attempted for n, group in ended.items() if group.attempted is not None}
        everyone = [each for members in attempted.values() for each in members]
        self._outcomes.count(everyone, self.new_per_batch * self.members)
        self.guard.tell(everyone)
        rollouts, tokens = stored(attempted)
        if rollouts:
            self.store.add(rollouts)
        ungraded = {rollout.admission for rollout in rollouts if not rollout.rewards}
        with self._changed:
            for number, group in ended.items():
                group.graded = number not in ungraded
                group.attempted = None
        return tokens

    def drawn(self, groups: Sequence[Group], ahead: int) -> None:
        """The batch is drawn: these groups are no longer open, and others are admitted."""
        at, numbers = time.perf_counter(), dict[int, Group]()
        for group in groups:
            numbers |= {r.admission: group for r in group.rollouts if r.admission is not None}
        last = max(numbers, default=-1)
        with self._changed:
            for number in [n for n, group in self._open.items() if n in numbers or (n < last and group.stored)]:
                if number in numbers:
                    self._waited.append(_waited(self._open.pop(number), numbers[number], at))
                else:
                    self._close(number)
            # At once: with fewer open groups, too many would be admitted for this batch.
            self._next_batch, self._need, self._gives_up = self._next_batch + 1, self.new_per_batch, False
        self.events.run(self._admit_some())

    async def _admit_some(self) -> int:
        return self._admit()

    def _admit(self) -> int:
        """Admit as many groups as the bound and the engine have room for. Runs in the event loop's thread."""
        with self._changed:
            numbers = [self._next() for _ in range(self._admissible())]
            if not numbers:
                return 0
            self._last_version = self.engine.version
            self._open |= {number: OpenGroup(time.perf_counter()) for number in numbers}
        self._running += len(numbers) * self.members
        for number, seeds in zip(numbers, attempt_seeds(self.seed, numbers, self.members), strict=True):
            self._tasks.add(task := asyncio.get_running_loop().create_task(self._write(number, seeds)))
            task.add_done_callback(self._tasks.discard)
        return len(numbers)

    def _next(self) -> int:
        if self._again:
            return self._again.pop(0)
        self.position += 1
        return self.position - 1

    def _admissible(self) -> int:
        """How many groups to admit now."""
        if self._error is not None:
            return 0
        ahead = UNBOUNDED if math.isinf(self.max_age) else self.engine.version + int(self.max_age) - self._next_batch
        bound = 0 if self._gives_up else self._need + ahead * self.new_per_batch
        again = len(self._again)  # these were admitted before the run was interrupted
        room = again + max(0, bound - len(self._open) - again)
        if self.max_age == 0:
            return 0 if self._running else room
        wanted = int(self.engine.slots * OVERSUBSCRIBED)
        free = wanted - self._running
        if self._running and free * FREE_SHARE < wanted:
            return 0
        if self._is_ahead() and not self._has_new_weights():
            self._stood_still |= not self._running
            return 0
        return max(0, min(room, -(-free // self.members)))

    def _is_ahead(self) -> bool:
        return self._drawable() >= max(self._need, self._lead * self.new_per_batch)

    def _has_new_weights(self) -> bool:
        """Whether the engine has nothing to write since a sync. All that was under way has ended then, so more is ready
        than usual, but the engine must not stand still: what it writes now is fresh."""
        return not self._running and self.engine.version != self._last_version

    def _drawable(self) -> int:
        """How many groups have ended, counted from the first in the order of admission up to one that has not."""
        numbers = self._in_order()
        ended = (number in self._open and self._open[number].ended is not None for number in numbers)
        return next((place for place, has_ended in enumerate(ended) if not has_ended), len(numbers))

    async def _write(self, number: int, seeds: list[int]) -> None:
        """Attempt one group. The first error that is not an episode's own ends the run."""
        group, attempts = self._open[number], list[asyncio.Task[Attempted]]()
        try:
            prompt, company = self.task.prompt(number), Company()
            attempts += [self._attempt(prompt, seed, company, member) for member, seed in enumerate(seeds)]
            attempted = await all_or_first_error(attempts)
        except BaseException as error:
            for each in attempts:
                each.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise
            return
        with self._changed:
            group.attempted, group.ended = attempted, time.perf_counter()
            self._changed.notify_all()

    def _attempt(self, prompt: Prompt, seed: int, company: Company, member: int) -> "asyncio.Task[Attempted]":
        trying = self._try(prompt, seed, company, member)
        return asyncio.get_running_loop().create_task(trying, context=company.member(member))

    async def _try(self, prompt: Prompt, seed: int, company: Company, member: int) -> Attempted:
        try:
            return await attempt(self.task, self.engine, prompt, self.sampling, seed, self.guard)
        finally:
            company.leave(member)
            self._free_slot()

    def _free_slot(self) -> None:
        """Many attempts end at once. Others are admitted when all of these have made way."""
        self._running -= 1
        if not self._will_admit:
            self._will_admit = True
            asyncio.get_running_loop().call_soon(self._admit_freed)

    def _admit_freed(self) -> None:
        self._will_admit = False
        self._admit()

    def close(self) -> None:
        """Cancel what is under way, and close the event loop."""
        with self._changed:
            self._error = self._error or RuntimeError("the supply is closed")
        self.events.close()

    @property
    def idle(self) -> bool:
        with self._changed:
            return all(group.stored for group in self._open.values())

    def state(self) -> SupplyState:
        self._generated += self._store_ended()
        with self._changed:
            running = tuple(sorted({*self._again, *(n for n, group in self._open.items() if not group.stored)}))
            ready = tuple(sorted(n for n, group in self._open.items() if group.stored))
            return SupplyState(self.position, running, ready)

    def restore(self, state: SupplyState) -> None:
        now = time.perf_counter()
        self.position, self._again = state.position, list(state.running)
        self._open = {number: OpenGroup(now, ended=now) for number in state.ready}
        begun = {*state.running, *state.ready}
        self.store.leave_out(number for number in range(state.position) if number not in begun)

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: the engine's seconds, groups that were closed without being drawn, failed episodes, and
        how long drawn groups took, by length and by reward."""
        before, self._worked = self._worked, self.engine.work
        waited, self._waited = self._waited, []
        closed, self._closed = self._closed, Counter()
        with self._changed:
            ready = sum(group.ended is not None for group in self._open.values())
            held = {"stream/ready": float(ready), "stream/running": float(len(self._open) - ready)}
        return (
            {"time/generate/decode": (self._worked - before).seconds} | held | self._outcomes.take()
            | grading_metrics(self.task)
            | {f"stream/closed_{reason}": count for reason, count in closed.items()} | waiting_times(waited)
        )  # fmt: skip


def _waited(opened: OpenGroup, group: Group, at: float) -> Waited:
    ended = opened.ended or at
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    return Waited(
        ended - opened.admitted, at - ended, fmean(rollout.length for rollout in group.rollouts), fmean(rewards or [0])
    )  # fmt: skip


def waiting_times(waited: Sequence[Waited]) -> dict[str, float]:
    """Mean seconds that groups took to be written and then waited to be drawn; also of the half with the longer
    responses, and of the half with the lower rewards, so that a disadvantage of slow or hard prompts shows.

    >>> times = waiting_times([Waited(1, 0, 10, 1.0), Waited(3, 4, 30, 0.0)])
    >>> times["time/stream/write"], times["time/stream/write_long"], times["time/stream/wait_short"]
    (2.0, 3.0, 0.0)
    """
    if not waited:
        return {}
    length, reward = median(each.length for each in waited), median(each.reward for each in waited)
    parts: dict[str, Iterable[Waited]] = {
        "": waited,
        "_long": [each for each in waited if each.length > length],
        "_short": [each for each in waited if each.length <= length],
        "_high": [each for each in waited if each.reward > reward],
        "_low": [each for each in waited if each.reward <= reward],
    }
    return {
        f"time/stream/{name}{suffix}": fmean(getattr(each, field) for each in some)
        for suffix, some in parts.items()
        for name, field in (("write", "writing"), ("wait", "waiting"))
        if some
    }
