"""A view of the ledger for draw policies other than first in, first out."""

from collections.abc import Iterable, Mapping

from solera.config import DrawConfig, writes
from solera.errors import SoleraError
from solera.protocols import Supplied, Tally
from solera.records import Group, PolicyVersion, Reward, Rollout, Use
from solera.store.catalogue import Catalogue
from solera.store.drawing import Ranking, Selection, rank
from solera.store.ledger import Ledger


class Selected:
    """Implements the Store protocol over a ledger and the section `[draw]`. With `by_admission`, new groups are drawn
    in the order of the task's stream, in whatever order they arrived, and imported rollouts are not new: with the
    policy `replay` they can be drawn like used ones."""

    selective = True

    def __init__(self, ledger: Ledger, draw: DrawConfig, seed: int, by_admission: bool = False) -> None:
        self.ledger = ledger
        self.by_admission = by_admission
        self.draw_config = draw
        self.seed = seed
        self._catalogue: Catalogue | None = None
        self._passed: Mapping[str, int] = {}
        self._left_out = set[int]()

    def add(self, rollouts: list[Rollout]) -> list[int]:
        return self.ledger.add(rollouts)

    def add_at_once(self, rollouts: list[Rollout]) -> list[int]:
        return self.ledger.add(rollouts)

    def add_reward(self, rollout_id: int, reward: Reward) -> None:
        self.ledger.add_reward(rollout_id, reward)

    def fetch(self, ids: list[int]) -> list[Rollout]:
        return self.ledger.fetch(ids)

    def watermark(self) -> int:
        return self.ledger.watermark()

    def uses_before(self, version: int) -> tuple[int, int]:
        return self.ledger.uses_before(version)

    def tally(self, after: int, since: int, reached: int, now: PolicyVersion) -> Tally:
        drops_late = writes(self.draw_config) and self.draw_config.leftovers == "drop"
        return self.ledger.tally(after, since, reached, now, drops_late, self.draw_config.max_age)

    def missing(self, groups: int, group_size: int, reserve: int, now: PolicyVersion) -> int:
        return self._rank(groups, group_size, now).missing(groups, reserve)

    def supplied(self, groups: int, group_size: int, now: PolicyVersion) -> Supplied:
        ranking = self._rank(groups, group_size, now)
        assert self._catalogue is not None
        return Supplied(ranking.needed(groups), ranking.visits(self._catalogue.rows))

    def leave_out(self, visits: Iterable[int]) -> None:
        self._left_out.update(visits)

    def draw(self, groups: int, group_size: int, now: PolicyVersion) -> list[Group]:
        ranking = self._rank(groups, group_size, now)
        assert self._catalogue is not None
        chosen = ranking.take(groups)
        self._passed = ranking.skipped(self._catalogue.rows, chosen)
        if not chosen and not any(share.written for share in ranking.shares):
            raise SoleraError(
                f"draw.policy = {self.draw_config.policy}: {_nothing(ranking.passed, self._catalogue.origins)}"
            )
        rows, keys = self._catalogue.rows, self._catalogue.keys
        with self.ledger.transaction():
            return self.ledger.form([(keys[rows.key_R[members[0]]], rows.id_R[members].tolist()) for members in chosen])

    def passed_over(self) -> Mapping[str, int]:
        return self._passed

    def record(self, uses: list[Use]) -> None:
        self.ledger.record(uses)
        if self._catalogue is not None:
            self._catalogue.used(use.rollout_id for use in uses)

    def flush(self) -> None:
        self.ledger.flush()

    def _rank(self, groups: int, group_size: int, now: PolicyVersion) -> Ranking:
        if self._catalogue is None:
            self._catalogue = Catalogue(now.lineage)
        with self.ledger.transaction() as connection:
            self._catalogue.refresh(connection)
        catalogue = self._catalogue
        selection = Selection(
            self.draw_config, group_size, now.version, self.seed, catalogue.origins, groups, self.by_admission,
            frozenset(self._left_out),
        )  # fmt: skip
        ranking = rank(catalogue.rows, selection)
        self._left_out = {visit for visit in self._left_out if visit > ranking.reached}
        return ranking


def _nothing(passed: Mapping[str, int], origins: tuple[str, ...]) -> str:
    if not passed and origins:
        return f"no rollouts of the origins in draw.shares; the store has {', '.join(origins)}"
    if not passed:
        return 'the store is empty: add rollouts with store.data = ["FILE.jsonl"]'
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in passed.items())
    return f"no group can be drawn; rollouts skipped: {reasons} (relax [draw], or add rewards: solera data reward)"
