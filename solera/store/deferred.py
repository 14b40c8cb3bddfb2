"""The ledger of a training run, first in, first out. It writes a step's rows while the engine generates the next batch.

During generation, the CPU waits for the GPU anyway. If the rows were written between a batch and its update, the GPU
would have to wait. A second thread would not help, because it would take Python's lock from the thread that feeds the
GPU.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from itertools import count

from solera.protocols import Supplied, Tally
from solera.records import Group, PolicyVersion, Reward, Rollout, Use
from solera.store.ledger import Ledger, in_groups, refuse_equal_parts
from solera.store.queue import Unused

FIRST_UNWRITTEN = 2**62
"""Ids from here on belong to rollouts that are not in the database yet. They sort after all that are."""


class Deferred:
    """Implements the Store protocol over a ledger. Keeps what `add` and `record` receive until `flush`, or until
    anything other than a draw needs it. A process that is killed earlier loses only the step that a resume would undo
    anyway. With `by_admission`, groups are drawn in the order of the task's stream, in whatever order they arrived,
    and imported rollouts are not drawn: whoever generates all the time counts on its own being drawn in time."""

    selective = False

    def __init__(self, ledger: Ledger, by_admission: bool = False) -> None:
        self.ledger = ledger
        self.by_admission = by_admission
        self._numbers = count(FIRST_UNWRITTEN)
        self._unwritten: dict[int, Rollout] = {}
        self._steps: list[list[Use]] = []
        self._written_as: dict[int, int] = {}
        """Final ids of rollouts that were written after they were drawn and before they were recorded."""
        self._groups: dict[int, int] = {}
        """Number of the group in which each rollout was last drawn."""

    def add(self, rollouts: list[Rollout]) -> list[int]:
        refuse_equal_parts(rollouts)
        numbered = {id_: rollout.numbered(id_) for id_, rollout in zip(self._numbers, rollouts, strict=False)}
        self._unwritten |= numbered
        return list(numbered)

    def add_at_once(self, rollouts: list[Rollout]) -> list[int]:
        return self.ledger.add(rollouts)

    def add_reward(self, rollout_id: int, reward: Reward) -> None:
        self.flush()
        self.ledger.add_reward(rollout_id, reward)

    def missing(self, groups: int, group_size: int, reserve: int, now: PolicyVersion | None = None) -> int:
        with self.ledger.transaction(), closing(self._unused()) as unused:
            return self.ledger.queue().missing(unused, groups + reserve, group_size)

    def supplied(self, groups: int, group_size: int, now: PolicyVersion | None = None) -> Supplied:
        with self.ledger.transaction(), closing(self._unused()) as unused:
            return Supplied(groups, self.ledger.queue().ready(unused, group_size))

    def leave_out(self, visits: Iterable[int]) -> None:
        with self.ledger.transaction():
            self.ledger.queue().leave_out(visits)

    def draw(self, groups: int, group_size: int, now: PolicyVersion | None = None) -> list[Group]:
        with self.ledger.transaction():
            with closing(self._unused()) as unused:
                chosen = self.ledger.queue().draw(unused, groups, group_size, self.by_admission)
            written = [(key, [id_ for id_ in members if id_ < FIRST_UNWRITTEN]) for key, members in chosen]
            found = self._unwritten | {
                rollout.id: rollout for group in self.ledger.form(written) for rollout in group.rollouts if rollout.id
            }
        self._groups = {id_: number for number, (_, members) in enumerate(chosen) for id_ in members}
        return [Group(key, tuple(found[id_] for id_ in members)) for key, members in chosen]

    def fetch(self, ids: list[int]) -> list[Rollout]:
        self.flush()
        return self.ledger.fetch(ids)

    def passed_over(self) -> Mapping[str, int]:
        return self.ledger.passed_over()

    def watermark(self) -> int:
        self.flush()
        return self.ledger.watermark()

    def uses_before(self, version: int) -> tuple[int, int]:
        self.flush()
        return self.ledger.uses_before(version)

    def tally(self, after: int, since: int, reached: int, now: PolicyVersion) -> Tally:
        self.flush()
        return self.ledger.tally(after, since, reached, now)

    def record(self, uses: list[Use]) -> None:
        uses = in_groups(uses, self._groups)
        self.ledger.pass_by(uses)
        if self._written_as:
            uses = [use._replace(rollout_id=self._written_as.get(use.rollout_id, use.rollout_id)) for use in uses]
            self._written_as = {}
        if uses:
            self._steps.append(uses)

    def flush(self) -> None:
        if self._unwritten or self._steps:
            self._written_as |= self.ledger.add_used(self._unwritten, self._steps)
            self._unwritten, self._steps = {}, []
        else:
            self.ledger.flush()

    def _unused(self) -> Generator[Unused, None, None]:
        """What could be drawn if everything were written, in order. Runs in the open transaction."""
        used = {use.rollout_id for step in self._steps for use in step}
        reached = self.ledger.queue().reached
        with closing(self.ledger.unused()) as written:
            yield from (row for row in written if row[0] not in used)
        for id_, rollout in self._unwritten.items():
            waits = rollout.admission is None or rollout.admission > reached
            if rollout.rewards and waits and id_ not in used:
                yield id_, rollout.prompt_key, rollout.admission
