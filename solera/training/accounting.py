"""Keeps the account of tokens: compares what the engines have sampled with what became of it.

The sides are counted apart. Engines count what they sample, receivers count what they are given (`engines/metered.py`),
and the store says what became of the rollouts.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from solera.errors import counted
from solera.folder.account import (
    ABORTED,
    LEFTOVER,
    MASKED,
    SUPERSEDED,
    TOO_OLD,
    UNSTORED,
    Account,
    append_account,
)
from solera.folder.counts import PURPOSES, SAMPLED, Counts
from solera.protocols import Engine, Store
from solera.records import PolicyVersion

TRAINING, *OTHER = PURPOSES
LATE = 1.0
"""Seconds by which a server's counter may lag behind its responses."""


class Accounting:
    """The account of a run, across restarts. `engines` are those whose tokens `counts` has under `SAMPLED`, in that
    order. An engine that has both places is counted once."""

    def __init__(
        self, counts: Counts, engines: Sequence[Engine], store: Store, file: Path, say: Callable[[str], None]
    ) -> None:
        self.counts = counts
        self.store = store
        self.file = file
        self.say = say
        named = list(zip(SAMPLED, engines, strict=True))
        self._engines = list({id(engine): (name, engine) for name, engine in reversed(named)}.values())
        self._before = {name: counts[name] - engine.sampled for name, engine in self._engines}
        """What earlier processes of the run had counted."""
        self._last = Account()
        self._stored = 0
        """Tokens in the store, counted by id and not by what became of them."""
        self._version = self._watermark = 0
        """Version and last id in the store when the account was taken last."""
        self._unanswered = self._unstored = 0
        """Lost tokens that an engine never returned, and lost ones that it returned and that were not stored."""
        self._said = False

    def restore(self, account: Account | None, now: PolicyVersion, watermark: int) -> None:
        """Continue from a checkpoint with this account and watermark. Rollouts that were stored after it are
        superseded. Everything else that is not in the store was lost."""
        if account is None and now.version > 0:
            self.say(f"the account of tokens begins at step {now.version}: an earlier version of Solera kept none")
        last = account or Account(since=now.version)
        later = self.store.tally(watermark, now.version, last.reached, now).stored
        dropped = {**last.dropped, SUPERSEDED: last.dropped.get(SUPERSEDED, 0) + later}
        self._last = dataclasses.replace(last, dropped=dropped)
        self._version, self._watermark, self._stored = now.version, self.store.watermark(), self._last.stored
        self._raise_counts()
        self._unstored = self.counts[TRAINING] - self.counts[UNSTORED] - self._stored
        returned = self.counts.sum(*PURPOSES)
        self._unanswered = self._sampled(returned) - returned - dropped.get(ABORTED, 0)

    def take(self, now: PolicyVersion, idle: bool) -> Account:
        """The account at this moment. `idle`: nothing is being written. Prints a sentence if it does not balance."""
        found = self.store.tally(self._watermark, self._version, self._last.reached, now)
        self._version, self._watermark, self._stored = now.version, self.store.watermark(), self._stored + found.stored
        # Other threads go on counting. What comes first is read last, so that no difference is negative for that.
        unstored = self.counts[UNSTORED]
        returned = {purpose: self.counts[purpose] for purpose in PURPOSES}
        generated, before = self._sampled(sum(returned.values())), self._last.dropped
        underway = returned[TRAINING] - unstored - self._stored - self._unstored
        unanswered = generated - sum(returned.values()) - before.get(ABORTED, 0) - self._unanswered
        self._last = Account(
            generated=generated,
            trained=self._last.trained + found.trained,
            waiting=found.waiting,
            writing=0 if idle else max(underway, 0) + max(unanswered, 0),
            dropped={
                MASKED: before.get(MASKED, 0) + found.masked, LEFTOVER: found.leftover, TOO_OLD: found.too_old,
                SUPERSEDED: before.get(SUPERSEDED, 0), UNSTORED: unstored,
                ABORTED: before.get(ABORTED, 0) + (max(unanswered, 0) if idle else 0),
            },
            other={purpose: returned[purpose] for purpose in OTHER},
            lost=self._unanswered + self._unstored, since=self._last.since, reached=found.reached,
        )  # fmt: skip
        self._tell(now.version)
        append_account(self.file, now.version, self._last)
        return self._last

    def _sampled(self, returned: int) -> int:
        """Ask the engines how much they have sampled. They have returned so much of it."""
        for wait in (0.0, LATE):
            time.sleep(wait)
            for name, engine in self._engines:
                self.counts.raise_to(name, self._before[name] + engine.sampled)
            if (sampled := self.counts.sum(*SAMPLED)) >= returned:
                break
        return sampled

    def _raise_counts(self) -> None:
        """Raise counts that are behind what the store holds: their file was deleted, or the machine crashed."""
        self.counts.raise_to(TRAINING, self._stored + self.counts[UNSTORED])
        missing = self.counts.sum(*PURPOSES) + self._last.dropped.get(ABORTED, 0) - self.counts.sum(*SAMPLED)
        if missing > 0:
            self.counts.add(SAMPLED[0], missing)
            self._before[SAMPLED[0]] += missing
            self.say(f"{self.file.parent}: the count of sampled tokens was {missing} too low for the store; raised")

    def _tell(self, version: int) -> None:
        if (apart := self._last.difference) and not self._said:
            self._said = True
            where = "in no other number" if apart > 0 else "counted twice"
            self.say(
                f"the account of tokens does not balance at step {version}: {counted(abs(apart), 'token')} {where} "
                f"({self.file})"
            )
