"""The engines of a pool: which of them serve, what they have to do, and which of them gets a request."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence

from solera.engines.faults import NoEngineError
from solera.engines.member import Member
from solera.engines.prefixes import Prefixes
from solera.tasks.event_loop import call_in

SLACK = 0.25
"""An engine that knows a text gets it, unless it has this share of its slots more to do than the least busy one."""
COUNTED = ("tokens", "set_aside", "restarts", "retries")
"""Fields of a member that count what it did."""


class Roster:
    """The members of a pool. `changed` guards its fields and theirs, and is notified when an engine comes or goes."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.prefixes = Prefixes()
        self._queue = deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]()
        """Requests that wait for room."""
        self._counted = [dict.fromkeys(COUNTED, 0)] * len(members)

    def serving(self) -> list[Member]:
        return [member for member in self.members if member.state == "serving"]

    def wait_for_serving(self) -> list[Member]:
        """The engines that serve. Waits for one. The lock is held."""
        self.changed.wait_for(lambda: self.serving() or self._over())
        if not self.serving():
            raise self._no_engine()
        return self.serving()

    def _over(self) -> bool:
        return self.closing.is_set() or all(member.lost for member in self.members)

    def _no_engine(self) -> NoEngineError:
        if self.closing.is_set():
            return NoEngineError("the engines are closed")
        return NoEngineError(f"no engine is left: {'; '.join(f'{m.name}: {m.fault}' for m in self.members)}")

    async def enter(self, token_ids: tuple[int, ...]) -> Member:
        """The engine for a text. Waits until one has room."""
        loop = asyncio.get_running_loop()
        while True:
            with self.changed:
                member = None if self.closing.is_set() else self._route(token_ids)
                if member is not None:
                    member.waiting += 1
                    return member
                if self._over() and (self.closing.is_set() or not self.serving()):
                    raise self._no_engine()
                self._queue.append((loop, room := loop.create_future()))
            try:
                await room
            except asyncio.CancelledError:
                if not room.cancelled():  # its turn had come: it is the next one's now
                    self.wake(1)
                raise

    def _route(self, token_ids: tuple[int, ...]) -> Member | None:
        free = [member for member in self.serving() if member.waiting < member.limit]
        if not free or len(self.members) == 1:
            return free[0] if free else None
        known = self.prefixes.shared(token_ids)
        idlest = min(free, key=lambda member: member.busy)
        knows = max(free, key=lambda member: (known.get(member.number, 0), -member.busy))
        mostly = 2 * known.get(knows.number, 0) > len(token_ids)
        chosen = knows if mostly and knows.busy <= idlest.busy + SLACK else idlest
        self.prefixes.add(token_ids, chosen.number)
        return chosen

    def leave(self, member: Member) -> None:
        with self.changed:
            member.waiting -= 1
        self.wake(1)

    def wake(self, count: int | None = None) -> None:
        """Let requests look for room again: so many, or all."""
        with self.changed:
            woken = list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]()
            while self._queue and (count is None or len(woken) < count):
                loop, room = self._queue.popleft()
                if not room.done() and not loop.is_closed():
                    woken.append((loop, room))
            self.changed.notify_all()
        for loop, room in woken:
            call_in(loop, self._let_in, room)

    def _let_in(self, room: "asyncio.Future[None]") -> None:
        if room.done():  # cancelled meanwhile
            self.wake(1)
        else:
            room.set_result(None)

    def take_metrics(self) -> dict[str, float]:
        """What each engine did since the last call, and how many of its requests are unanswered now."""
        found = dict[str, float]()
        with self.changed:
            for member in self.members:
                place, before = f"engine/{member.number}", self._counted[member.number]
                now = self._counted[member.number] = {name: getattr(member, name) for name in COUNTED}
                found |= {f"{place}/{name}": float(now[name] - before[name]) for name in COUNTED}
                found |= {f"{place}/waiting": member.waiting, f"{place}/serving": float(member.state == "serving")}
        return found
