"""The ledger of a training run: rows go into the database while the run goes on."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from solera.records import PROBE, Group, Rollout
from solera.store.database import Place
from solera.store.ledger import LIST_UNUSED, Ledger, first_groups

T = TypeVar("T")


class WritingBehind(Ledger):
    """`add` and `record` take the lock and the numbers, and return while a thread of its own writes and commits.

    The next call waits for that and raises what went wrong; only `draw` right after `add` need not wait. What `add` and
    `record` have returned from outlives the process once a later call has returned, `close` being the last.
    """

    _drawn_from = False
    _writing: Future[None] | None = None
    _drawable: list[tuple[int, str]] | None = None
    """Ids and prompt keys that the query will list once the rows being written are in."""

    def __init__(self, place: Place) -> None:
        self._thread = ThreadPoolExecutor(1, "solera-store")
        super().__init__(place)

    def draw(self, groups: int, group_size: int) -> list[Group]:
        self._drawn_from = True
        if self._drawable is not None and self._writing is not None and not self._writing.done():
            chosen = first_groups(self._drawable, groups, group_size)
            if all(id_ in self._recent for _, members in chosen for id_ in members):
                return self._form(chosen)
        return super().draw(groups, group_size)

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[Connection]:
        if (failure := self._finish()) is not None:
            raise failure
        with super().transaction(write) as connection:
            yield connection

    def close(self) -> None:
        failure = self._finish()
        self._thread.shutdown()
        super().close()
        if failure is not None:
            raise failure

    def _write(self, begin: Callable[[], T], rest: Callable[[T], None]) -> T:
        with ExitStack() as open_here:
            open_here.enter_context(self.transaction(write=True))
            begun = begin()
            self._writing = self._thread.submit(_within, open_here.pop_all(), partial(rest, begun))
        return begun

    def _number(self, new: list[Rollout]) -> list[tuple[int, Rollout]]:
        """Before they are inserted: the rows there are, and these after them, are what a query will find."""
        numbered = super()._number(new)
        if self._drawn_from:
            self._forget_regraded()
            there = [(id_, key) for id_, key in self._connection.execute(LIST_UNUSED)]
            self._drawable = there + [(i, r.prompt_key) for i, r in numbered if r.rewards and r.origin != PROBE]
        return numbered

    def _finish(self) -> BaseException | None:
        """Wait for what is being written; whoever is interrupted here leaves it to the next."""
        failure = self._writing.exception() if self._writing is not None else None
        self._writing = self._drawable = None
        if failure is not None:
            self._recent.clear()  # others may be given the ids of what is not there
        return failure


def _within(transaction: AbstractContextManager[object], work: Callable[[], None]) -> None:
    with transaction:
        work()
