"""Several engines that act as one.

A request goes to the engine that has read the longest part of its text before, unless another one has much less to do
(`roster.py`). A request that fails is sent again, to another engine if there is one.

An engine is suspected after a request has failed, and gets no requests until it has answered a short one. It is *set
aside* if it does not answer that, if an answer cannot be right, or if it has missed a sync. (While the others still
load, nothing that it writes is used.) A thread then brings it back: it opens the engine again (a server that we
launched is started again), loads the weights that were published last, proves that they arrived, and readmits it.
Meanwhile the others go on. If none is left, `NoEngineError` ends the run.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from solera.config import InFlight
from solera.engines.faults import DivergedError, EngineError, GarbageError, NoEngineError, TakenError
from solera.engines.member import REMEMBERED, Member, Open, Opened, Witness, said_by
from solera.engines.roster import Roster
from solera.errors import BadRequestError, SoleraError
from solera.models.digest import describe
from solera.protocols import Weights, Work, Writer
from solera.records import Completion, Manifest, PolicyVersion, Sampling
from solera.sync.proof import SyncFaultError, difference, tolerance
from solera.tasks.event_loop import call_in

T = TypeVar("T")
Outcome = Manifest | Exception
"""What an engine holds after a sync, or why it missed it."""
TRIES = 5
"""How often a request, or weights that no engine takes, are sent before the error ends the run."""
BACK_OFF = 0.1
"""Seconds before a request is sent for the second time. Doubled each time."""
REOPEN = 1.0
"""Seconds between the first and the second attempt to bring an engine back. Doubled each time, up to `REOPEN_LONGEST`.
"""
REOPEN_LONGEST = 60.0
CHECKING = 60.0
"""Seconds in which an engine must answer a short request."""


class Published(NamedTuple):
    """The weights that all engines of the pool should hold."""

    manifest: Manifest
    tensors: dict[str, Any]
    """A copy. A server cannot return its weights."""
    witnesses: tuple[Witness, ...] = ()
    """Answers that were proven to be written with these weights."""

    def weights(self) -> Weights:
        return Weights(self.manifest.lineage, self.manifest.version, iter(self.tensors.items()))


class EnginePool:
    """An `Engine` made of several. `opens` start or connect to them, in parallel; the same functions open them again.

    `timeout` is how many seconds a request may take, and how long the run waits for an engine if none serves. `say`
    prints a note.
    """

    def __init__(self, opens: Sequence[Open], *, timeout: float, say: Callable[[str], None]) -> None:
        self.opens = opens
        self.timeout = timeout
        self.say = say
        self.members = [Member(number, opened, timeout) for number, opened in enumerate(_open_all(opens))]
        self.roster = Roster(self.members)
        self.dtype = self.members[0].dtype
        self.slots = sum(max(1, member.engine.slots) for member in self.members)
        self._lock = self.roster.changed
        """Guards all fields below."""
        self._history: list[PolicyVersion] = []
        """The weights that were sent last, the latest at the end."""
        self._forgotten = 0
        """How many were sent before those."""
        self._settled = 0
        """How many were sent before those that all serving engines hold."""
        self._published: Published | None = None
        self._turn = threading.Lock()
        """Held while weights are published, and while an engine catches up: it could be overtaken for ever."""
        self._writing = 0
        self._since = 0.0
        self._own = Work()
        """Work of this object, and of engines that are gone."""
        self._sampled = 0
        """Tokens that engines sampled which are gone."""
        self._threads = set[threading.Thread]()
        """Each checks an engine or brings one back."""

    @property
    def version(self) -> int:
        return self._published.manifest.version if self._published else 0

    @property
    def work(self) -> Work:
        with self._lock:
            return reduce(Work.__add__, (_without_time(member.engine.work) for member in self.members), self._own)

    @property
    def sampled(self) -> int:
        with self._lock:
            gone, engines = self._sampled, [member.engine for member in self.members]
        return gone + sum(engine.sampled for engine in engines)  # a server is asked, which may take a while

    def take_metrics(self) -> dict[str, float]:
        return self.roster.take_metrics()

    def close(self) -> None:
        self.roster.closing.set()
        self.roster.wake()
        for member in self.members:
            member.engine.close()

    # -- weights -------------------------------------------------------------------------------------------------

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        """Send the weights to all engines at once. One that fails, or holds something else afterwards, is set aside. If
        all of them refuse the weights, the error is raised. If all fail otherwise, the first that is back gets them."""
        with self._lock:
            self._history.append(PolicyVersion(weights.lineage, weights.version))
            self._forgotten += max(0, len(self._history) - REMEMBERED)
            del self._history[:-REMEMBERED]
        new: Published | None = None
        for _ in range(TRIES):
            with self._publishing() as members:
                if new is None:
                    new, outcomes = self._publish(weights, members, in_flight)
                else:
                    outcomes = self._load(new, members, in_flight)
                held = self._settle(outcomes, new)
            if held is not None:
                return held
        assert new is not None
        name, error = members[0].name, outcomes[members[0]]
        raise EngineError(f"sync of version {new.manifest.version} failed {TRIES} times: {name}: {error}")

    def _publish(
        self, weights: Weights, members: Sequence[Member], in_flight: InFlight
    ) -> tuple[Published, dict[Member, Outcome]]:
        """Take the tensors and send them to these engines. Returns what was sent, and what each engine made of it."""
        tensors, start = dict(weights.tensors), time.perf_counter()
        sent = Manifest(weights.lineage, weights.version, describe(tensors.items()))
        new = Published(sent, {name: tensor.detach().to("cpu", copy=weights.lent) for name, tensor in tensors.items()})
        with self._lock:
            self._own += Work(digesting=time.perf_counter() - start)
        return new, self._load(new._replace(tensors=tensors), members, in_flight)

    def _load(self, sent: Published, members: Sequence[Member], in_flight: InFlight) -> dict[Member, Outcome]:
        def load(member: Member) -> Manifest:
            return member.engine.load(sent.weights(), in_flight)

        return of_each(members, lambda each: self._watched(each, sent, load))

    def _watched(self, member: Member, sent: Published, load: Callable[[Member], Manifest]) -> Manifest:
        try:
            held = load(member)
        except Exception:
            self._doubt(member)
            raise
        if difference(sent.manifest, held, None) is not None:
            self._doubt(member)
        return held

    def _doubt(self, member: Member) -> None:
        """An engine may hold half of the new weights, and still label its tokens with the old ones. What it writes is
        not used. Others may take long to load, so this does not wait for them."""
        with self._lock:
            member.doubted = True
        if member.loop is not None:
            call_in(member.loop, member.drop_requests)

    def _end_doubts(self, members: Sequence[Member]) -> None:
        """After a sync. Engines that missed it are set aside by now. If all refused it, the old weights go on."""
        with self._lock:
            doubted = [member for member in members if member.doubted]
            for member in doubted:
                member.doubted = False
        if doubted:
            self.roster.wake()

    @contextmanager
    def _publishing(self) -> Iterator[list[Member]]:
        """The engines that serve. No other is readmitted meanwhile."""
        while True:
            with self._lock:
                self.roster.wait_for_serving()
            with self._turn:
                with self._lock:
                    members = self.roster.serving()
                if members:
                    try:
                        yield members
                    finally:
                        self._end_doubts(members)
                    return

    def _settle(self, outcomes: dict[Member, Outcome], new: Published) -> Manifest | None:
        """Set engines aside that missed the sync. Returns what the others hold, or `None` if there are none."""
        errors = {member: each for member, each in outcomes.items() if isinstance(each, Exception)}
        held = {member: each for member, each in outcomes.items() if isinstance(each, Manifest)}
        _raise_what_concerns_all(errors, len(outcomes))
        wrong = {member: difference(new.manifest, each, None) for member, each in held.items()}
        if any(fault is None for fault in wrong.values()):  # if all are wrong, the caller says so
            held = {member: each for member, each in held.items() if wrong[member] is None}
            errors |= {member: SyncFaultError(fault) for member, fault in wrong.items() if fault is not None}
        if held:
            with self._lock:
                self._published, self._settled = new, self._forgotten + len(self._history) - 1
        for member, error in errors.items():
            self._set_aside(member, error, f"it missed the sync of version {new.manifest.version}: ")
        return next(iter(held.values()), None)

    def prove(self, check: Callable[[Writer], str | None]) -> None:
        """Let `check` look at every engine. Those with a fault are set aside. If all have one, it is raised."""
        for _ in range(TRIES):
            with self._lock:
                members = self.roster.wait_for_serving()
            errors, proven = dict[Member, Exception](), None
            for member in members:
                try:
                    proven = self._prove(member, check)
                except Exception as error:
                    errors[member] = error
            _raise_what_concerns_all(errors, len(members))
            for member, fault in errors.items():
                self._set_aside(member, fault)
            if proven is not None:
                with self._lock:
                    assert self._published is not None, "nothing was loaded"
                    self._published = self._published._replace(witnesses=proven)
                return
        raise EngineError(f"the proof of a sync failed {TRIES} times: {errors[members[0]]}")

    def _prove(self, member: Member, check: Callable[[Writer], str | None]) -> tuple[Witness, ...]:
        member.authors, member.witnesses = self._history, {}
        fault = check(member)
        if fault is not None:
            raise SyncFaultError(f"{member.name}: {fault}")
        return tuple(member.witnesses.values())

    def weights(self) -> Weights:
        """The weights that were published last."""
        return self._published.weights() if self._published else Weights("", 0, iter(()))

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Continue one text. If an engine fails, the next one gets the same seed."""
        self._count(1)
        try:
            for tried in range(TRIES):
                if tried:
                    await asyncio.sleep(BACK_OFF * 2 ** (tried - 1))
                try:
                    return await self._generate(token_ids, sampling, seed)
                except EngineError as error:
                    failure = error
            raise EngineError(f"a request failed {TRIES} times; the last time: {failure}") from failure
        finally:
            self._count(-1)

    async def _generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """One attempt. Any failure that another engine may not have is raised as an `EngineError`."""
        member = await self.roster.enter(token_ids)
        start = self._settled
        try:
            return await member.ask(token_ids, sampling, seed, lambda: self._sent_since(start))
        except (BadRequestError, DivergedError):
            raise
        except Exception as error:
            self._suspect(member, error, Witness(token_ids, Sampling(sampling.temperature, 1), 0))
            raise EngineError(f"{member.name}: {said_by(member.name, error)}") from error
        finally:
            self.roster.leave(member)

    def _sent_since(self, start: int) -> list[PolicyVersion]:
        with self._lock:
            return self._history[max(0, start - self._forgotten) :]

    def _count(self, change: int) -> None:
        """Count the seconds in which there are requests."""
        with self._lock:
            if not self._writing:
                self._since = time.perf_counter()
            self._writing += change
            if not self._writing:
                self._own += Work(seconds=time.perf_counter() - self._since)

    # -- failures ------------------------------------------------------------------------------------------------

    def _suspect(self, member: Member, error: Exception, short: Witness) -> None:
        """A request has failed. Others that fail at the same time need no second check."""
        with self._lock:
            member.retries += 1
            if member.state != "serving" or member.doubted:
                return
            member.state, held = "suspected", self._published
        self._in_thread(self._check, member, error, short, held)

    def _set_aside(self, member: Member, error: Exception, why: str = "") -> None:
        with self._lock:
            if member.state != "serving":  # it is being looked after already, and gets the new weights
                return
            member.state = "aside"
        self._in_thread(self._bring_back, member, error, why)

    def _in_thread(self, work: Callable[..., None], member: Member, *given: Any) -> None:
        def run() -> None:
            try:
                work(member, *given)
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, daemon=True, name=f"solera-engine-{member.number}")
        self._threads.add(thread)
        thread.start()

    def wait_for_threads(self, seconds: float) -> None:
        """After `close`, wait until no thread uses an engine any more."""
        deadline = time.monotonic() + seconds
        for thread in tuple(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _check(self, member: Member, error: Exception, short: Witness, held: Published | None) -> None:
        """Readmit a suspected engine if it answers a short request. Otherwise set it aside."""
        if not isinstance(error, GarbageError | TakenError):
            try:
                self._ask(member, short)
                if not self._holds_newest(member, held):
                    self._catch_up(member)
                return
            except Exception as failed:
                error = failed if isinstance(failed, TakenError) else error
        self._bring_back(member, error, "")

    def _bring_back(self, member: Member, error: Exception, why: str) -> None:
        """Runs in a thread of its own until the engine serves again, or nobody waits for it any more."""
        self._note(member, error, why)
        wait, closing = REOPEN, self.roster.closing
        while not closing.is_set() and not isinstance(error, TakenError):
            try:
                self._reopen(member)
                self._catch_up(member)
                self.say(f"{member.name} is back with the weights of version {self.version}")
                return
            except Exception as failed:
                error = failed
                self._count_failure(member, error)
            closing.wait(wait)
            wait = min(2 * wait, REOPEN_LONGEST)

    def _note(self, member: Member, error: Exception, why: str) -> None:
        """Say that an engine is set aside, and give up its requests, so that others answer them."""
        with self._lock:
            member.state, member.since, member.set_aside = "aside", time.monotonic(), member.set_aside + 1
            member.fault, member.lost = why + said_by(member.name, error), isinstance(error, TakenError)
            self.roster.prefixes.forget(member.number)
        self.say(f"{member.name} is set aside: {member.fault}{'' if member.lost else '; trying to bring it back'}")
        if member.loop is not None:
            call_in(member.loop, member.drop_requests)
        self.roster.wake()

    def _count_failure(self, member: Member, error: Exception) -> None:
        with self._lock:
            member.fault = said_by(member.name, error)
            member.lost = isinstance(error, TakenError) or time.monotonic() - member.since >= self.timeout
        self.roster.wake()

    def _reopen(self, member: Member) -> None:
        sampled = member.engine.sampled
        member.engine.close()
        opened = self.opens[member.number]()
        with self._lock:
            self._own += _without_time(member.engine.work)
            self._sampled += sampled
            member.name, member.engine, member.ahead = opened
            member.restarts += 1
        if self.roster.closing.is_set():
            opened.engine.close()
            raise NoEngineError("the engines are closed")

    def _catch_up(self, member: Member) -> None:
        """Give an engine the weights that were published last, with proof, and readmit it."""
        with self._turn:
            published = self._published
            if published is not None:
                held = member.engine.load(published.weights())
                fault = difference(published.manifest, held, None) or self._differs(member, published)
                if fault is not None:
                    raise SyncFaultError(f"{member.name}: sync of version {published.manifest.version}: {fault}")
            self._readmit(member)

    def _differs(self, member: Member, published: Published) -> str | None:
        """How an engine answers otherwise than was proven for the weights that it should hold."""
        apart = [witness.apart(self._ask(member, witness)) for witness in published.witnesses]
        common = [each for each in apart if each is not None]
        if apart and not common:
            return "it says that it holds these weights but does not write with them"
        if common and not max(common) <= tolerance(self.dtype, published.witnesses[0].sampling.temperature):
            return f"its log-probabilities differ by {max(common):.2g} from those that were proven"
        return None

    def _ask(self, member: Member, asked: Witness) -> Completion:
        """Send a short request from a thread outside the event loop."""
        loop = next((each.loop for each in self.members if each.loop and not each.loop.is_closed()), None)
        if loop is None:
            raise EngineError(f"{member.name}: no event loop is left to ask it")
        limit = min(CHECKING, self.timeout)
        work = member.ask(asked.token_ids, asked.sampling, asked.seed, lambda: self._history, limit)
        try:
            begun = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # the loop was closed meanwhile
            work.close()
            raise
        return begun.result(limit + CHECKING)

    def _holds_newest(self, member: Member, held: Published | None) -> bool:
        """Readmit a suspected engine if nothing was published since."""
        with self._turn:
            now = self._published
            if (now and now.manifest) != (held and held.manifest):
                return False
            self._readmit(member)
            return True

    def _readmit(self, member: Member) -> None:
        with self._lock:
            member.state, member.lost = "serving", False
        self.roster.wake()


def _open_all(opens: Sequence[Open]) -> list[Opened]:
    """Open all engines. If one does not open, the others are closed again."""
    with ThreadPoolExecutor(len(opens)) as threads:
        begun = [threads.submit(each) for each in opens]
    if any(each.exception() for each in begun):
        for each in begun:
            if not each.exception():
                each.result().engine.close()
    return [each.result() for each in begun]


def of_each(members: Sequence[Member], work: Callable[[Member], T]) -> dict[Member, T | Exception]:
    """What `work` returns for each member, or the error that it raises. All work at the same time."""

    def done(member: Member) -> T | Exception:
        try:
            return work(member)
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(1, len(members))) as threads:
        return dict(zip(members, threads.map(done, members), strict=True))


def _raise_what_concerns_all(errors: dict[Member, Exception], engines: int) -> None:
    """Raise an error that is not one engine's own: wrong settings, a full disk, or weights that all engines refuse."""
    for error in errors.values():
        own = isinstance(error, EngineError | SyncFaultError) or not isinstance(error, SoleraError | OSError)
        if not own or (isinstance(error, SyncFaultError) and len(errors) == engines):
            raise error


def _without_time(work: Work) -> Work:
    return replace(work, seconds=0.0, prefilling=0.0)
