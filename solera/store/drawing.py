"""Choose the rollouts of a batch: pure ranking of rows, without reading or writing.

Rows are ordered by prompt and, within a prompt, by arrival. The rows of a prompt are cut into groups. Groups are
filtered and ranked, and the first ones are drawn. Skipped rollouts are counted by reason.

A visit is one position in the task's stream. The rollouts that the run generated for one visit form their own group, as
in `queue.py`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from solera.config import DrawConfig, OrderName, apportion, shares_of, writes
from solera.errors import SoleraError
from solera.streams import stream_seed

NO_AGE = np.iinfo(np.int32).min
"""Version of a row without an age: text of another run, another model or a person."""
NO_VISIT = -1
Mask = npt.NDArray[np.bool_]
Order = OrderName | Literal["first"]


class Rows(NamedTuple):
    """The columns that drawing needs of each rollout (`_R`), ordered by prompt and then by id."""

    id_R: npt.NDArray[np.int64]
    key_R: npt.NDArray[np.int32]
    origin_R: npt.NDArray[np.int16]
    version_R: npt.NDArray[np.int32]
    uses_R: npt.NDArray[np.int32]
    reward_R: npt.NDArray[np.float32]
    """NaN until a reward arrives."""
    admission_R: npt.NDArray[np.int32]
    """`NO_VISIT` for imported rollouts."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Group p holds the rows `member_R[start_P[p] : start_P[p] + size_P[p]]`."""

    member_R: npt.NDArray[np.int64]
    start_P: npt.NDArray[np.int64]
    size_P: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start_P)

    def of(self, place: int) -> npt.NDArray[np.int64]:
        return self.member_R[self.start_P[place] : self.start_P[place] + self.size_P[place]]


@dataclass(frozen=True)
class Selection:
    """A draw policy at one moment. `now` is the learner's version, `origins` are the names behind `Rows.origin_R`."""

    draw: DrawConfig
    group_size: int
    now: int
    seed: int
    origins: tuple[str, ...]
    most: int
    """Maximum number of groups that will be drawn. Only so many need to be sorted."""
    by_admission: bool = False
    """Whether `first` means the order of the task's stream, not of arrival. Imported groups are then never new."""
    left_out: frozenset[int] = frozenset()
    """Visits that are not to be drawn as new ones."""

    @property
    def least(self) -> int:
        return self.group_size if self.draw.min_rewarded is None else self.draw.min_rewarded


@dataclass(frozen=True, eq=False)
class BatchShare:
    """Groups, the indices of the best of them, and the share of the batch that they fill."""

    share: float
    groups: Groups
    best_P: npt.NDArray[np.int64]
    written: bool
    """Whether the run generates these groups itself, so that it can make up a shortage."""

    def between(self, start: int, stop: int) -> list[npt.NDArray[np.int64]]:
        return [self.groups.of(place) for place in self.best_P[start:stop].tolist()]


@dataclass(frozen=True, eq=False)
class Ranking:
    """The shares of a batch, and the rollouts that were skipped."""

    shares: list[BatchShare]
    passed: Mapping[str, int]
    short_R: npt.NDArray[np.int32]
    """Admissions of rollouts whose visit does not have enough rewards for a group yet."""
    reached: int
    """The last admission that a step has used."""

    def skipped(self, rows: Rows, chosen: list[npt.NDArray[np.int64]]) -> Mapping[str, int]:
        """Number of skipped rollouts by reason, once `chosen` is drawn. Incomplete visits before the drawn ones become
        leftovers."""
        drawn_R = rows.admission_R[np.concatenate(chosen)] if chosen else rows.admission_R[:0]
        left = int((self.short_R <= drawn_R.max(initial=self.reached)).sum())
        return Counter(self.passed) + Counter(leftover=left) - Counter(incomplete=left)

    def take(self, groups: int) -> list[npt.NDArray[np.int64]]:
        """Take each share's groups. If one share is short, the others fill in, the first share first."""
        pairs = list(zip(self.shares, apportion(groups, [part.share for part in self.shares]), strict=True))
        chosen = [group for part, count in pairs for group in part.between(0, count)]
        for part, count in pairs:
            chosen += part.between(count, count + groups - len(chosen))
        return chosen

    def missing(self, groups: int, reserve: int) -> int:
        """Number of groups to generate so that `groups` can be drawn and `reserve` remain; 0 if the run generates
        nothing."""
        wanted = self.needed(groups) + reserve
        return sum(max(0, wanted - len(part.groups)) for part in self.shares if part.written)

    def needed(self, groups: int) -> int:
        """Number of new groups that a draw of `groups` takes, if the run generates any."""
        counts = apportion(groups, [part.share for part in self.shares])
        pairs = list(zip(self.shares, counts, strict=True))
        return groups - sum(min(count, len(part.groups)) for part, count in pairs if not part.written)

    def visits(self, rows: Rows) -> set[int]:
        """The visits whose groups can be drawn as new ones."""
        members = [part.groups.of(place) for part in self.shares if part.written for place in range(len(part.groups))]
        return {int(rows.admission_R[each].max()) for each in members}


def rank(rows: Rows, selection: Selection) -> Ranking:
    """All groups that can be drawn now, in the order in which the policy draws them."""
    draw, passed = selection.draw, Passed()
    eligible_R = _eligible(rows, selection, passed)
    reached = int(rows.admission_R[rows.uses_R > 0].max(initial=NO_VISIT))
    new_R = eligible_R & (rows.uses_R == 0)
    if selection.by_admission:
        new_R &= rows.admission_R != NO_VISIT
    if writes(draw) and draw.leftovers == "drop":
        new_R &= ~_late(rows, new_R, reached, selection, passed)
    if draw.policy == "fresh":
        parts = [_part(rows, selection, passed, 1.0, new_R, "first", True)]
    elif draw.policy == "replay":
        old_R = eligible_R & (rows.uses_R > 0)
        if selection.by_admission:
            old_R |= eligible_R & (rows.admission_R == NO_VISIT)
        parts = [
            _part(rows, selection, passed, draw.fresh, new_R, "first", True),
            _part(rows, selection, passed, 1 - draw.fresh, old_R, draw.order),
        ]
    elif draw.policy == "offline":
        parts = [_part(rows, selection, passed, 1.0, eligible_R, draw.order)]
    else:
        by_origin = {o: (new_R if o == "self" else eligible_R) & _from(rows, selection, o) for o in shares_of(draw)}
        mixed = _within if draw.mix == "within" else _between
        parts = mixed(rows, selection, passed, by_origin)
    short_R = np.concatenate([rows.admission_R[:0], *passed.short])
    return Ranking(parts, {reason: count for reason, count in passed.items() if count}, short_R, reached)


class Passed(Counter[str]):
    """Number of skipped rollouts by reason. `short` are admissions, as in `Ranking.short_R`."""

    def __init__(self) -> None:
        super().__init__()
        self.short: list[npt.NDArray[np.int32]] = []

    def incomplete(self, admission_R: npt.NDArray[np.int32], written: bool) -> None:
        self["incomplete"] += len(admission_R)
        if written:
            self.short.append(admission_R[admission_R != NO_VISIT])


def _eligible(rows: Rows, selection: Selection, passed: Passed) -> Mask:
    draw = selection.draw
    left_R = ~np.isnan(rows.reward_R)
    passed["unrewarded"] = len(left_R) - int(left_R.sum())
    for reason, out_R in (
        ("too_old", _too_old(rows, selection)),
        ("used_up", None if draw.max_uses is None else rows.uses_R >= draw.max_uses),
    ):
        if out_R is not None:
            passed[reason] = int((left_R & out_R).sum())
            left_R = left_R & ~out_R
    return left_R


def _too_old(rows: Rows, selection: Selection) -> Mask | None:
    if selection.draw.max_age is None:
        return None
    return (rows.version_R < selection.now - selection.draw.max_age) & (rows.version_R != NO_AGE)


def _late(rows: Rows, new_R: Mask, reached: int, selection: Selection, passed: Passed) -> Mask:
    """Rows of visits that are left out, or lie before one that a step has used. Flat groups among them are counted as
    flat."""
    late_R = new_R & (rows.admission_R != NO_VISIT) & (rows.admission_R <= reached)
    if selection.left_out:
        late_R |= new_R & np.isin(rows.admission_R, list(selection.left_out))
    if late_R.any():
        found = Passed()
        _filtered(rows, _cut_visits(rows, late_R, selection.group_size), selection, found)
        passed["flat"] += found["flat"]
        passed["leftover"] += int(late_R.sum()) - found["flat"]
    return late_R


def draws_from(draw: DrawConfig, origin: str) -> bool:
    """Whether the policy uses text of this origin."""
    return draw.policy != "mixed" or any(fnmatchcase(origin, pattern) for pattern in shares_of(draw))


def absent(draw: DrawConfig, origins: Iterable[str]) -> str | None:
    """The first share that none of these origins matches. The run's own text is never absent, because it will be
    generated."""
    known = {"self", *origins}
    return next((o for o in shares_of(draw) if not any(fnmatchcase(origin, o) for origin in known)), None)


def _from(rows: Rows, selection: Selection, pattern: str) -> Mask:
    """Rows whose origin matches `pattern`, in which `*` matches anything."""
    codes = [code for code, origin in enumerate(selection.origins) if fnmatchcase(origin, pattern)]
    return np.isin(rows.origin_R, codes)


def _part(
    rows: Rows, selection: Selection, passed: Passed, share: float, chosen_R: Mask, order: Order,
    written: bool = False,
) -> BatchShare:  # fmt: skip
    size, newest_whole = selection.group_size, order in ("newest", "priority")
    cut = _cut_visits(rows, chosen_R, size) if written else _cut(rows, chosen_R, size, newest_whole)
    groups = _filtered(rows, cut, selection, passed, written)
    return BatchShare(share, groups, _ranked(rows, groups, selection, order), written)


def _between(rows: Rows, selection: Selection, passed: Passed, by_origin: dict[str, Mask]) -> list[BatchShare]:
    """Groups of one origin each."""
    shares = shares_of(selection.draw)
    return [
        _part(rows, selection, passed, shares[origin], chosen_R, "first" if origin == "self" else selection.draw.order,
              origin == "self")
        for origin, chosen_R in by_origin.items()
    ]  # fmt: skip


def _within(rows: Rows, selection: Selection, passed: Passed, by_origin: dict[str, Mask]) -> list[BatchShare]:
    """Groups with members of every origin, in their shares. A group without members of one origin is incomplete."""
    quotas = quotas_of(selection.draw, selection.group_size)
    cuts = [
        _cut_visits(rows, by_origin[origin], quotas[origin])
        if origin == "self"
        else _cut_in_turn(rows, by_origin[origin], quotas[origin], selection)
        for origin in sorted(quotas, key=lambda origin: origin != "self")  # the run's own text comes first in a group
    ]
    numbers = [_numbers(rows, cut) for cut in cuts]
    number_R, member_R = np.concatenate(numbers), np.concatenate([cut.member_R for cut in cuts])
    met_R = np.isin(number_R, reduce(np.intersect1d, numbers))
    passed.incomplete(rows.admission_R[member_R[~met_R]], "self" in quotas)
    number_R, member_R = number_R[met_R], member_R[met_R]
    in_order = np.argsort(number_R, kind="stable")
    start_P = _run_starts(number_R[in_order])
    groups = Groups(member_R[in_order], start_P, np.diff(start_P, append=len(member_R)))
    groups = _filtered(rows, groups, selection, passed, "self" in quotas)
    order: Order = "first" if "self" in quotas else selection.draw.order
    return [BatchShare(1.0, groups, _ranked(rows, groups, selection, order), "self" in quotas)]


def _numbers(rows: Rows, cut: Groups) -> npt.NDArray[np.int64]:
    """For each row, the number of its prompt and of its group within the prompt, to match with other origins."""
    key_P = rows.key_R[cut.member_R[cut.start_P]].astype(np.int64)
    place_P = _count_up(np.diff(_run_starts(key_P), append=len(key_P)))
    return np.repeat(key_P << 32 | place_P, cut.size_P)


def quotas_of(draw: DrawConfig, group_size: int) -> dict[str, int]:
    """Number of members of each origin in a group that mixes origins."""
    shares = shares_of(draw)
    quotas = dict(zip(shares, apportion(group_size, list(shares.values())), strict=True))
    if without := [origin for origin, members in quotas.items() if not members]:
        raise SoleraError(
            f"draw.shares: {without[0]} gets no member of a group of {group_size}: raise it, or collect.group_size"
        )
    return quotas


def _cut(rows: Rows, chosen_R: Mask, size: int, newest_whole: bool = False) -> Groups:
    """Cut a prompt's rows into groups, one after the other. The last group may be incomplete; with `newest_whole`, the
    first."""
    member_R = np.flatnonzero(chosen_R)
    key_R = rows.key_R if len(member_R) == len(chosen_R) else rows.key_R[member_R]
    return _divided(member_R, key_R, size, newest_whole)


def _cut_visits(rows: Rows, chosen_R: Mask, size: int) -> Groups:
    """Like `_cut`, separately for each visit."""
    member_R = np.flatnonzero(chosen_R)
    visit_R = rows.key_R[member_R].astype(np.int64) << 32 | (rows.admission_R[member_R] - NO_VISIT)
    in_order = np.argsort(visit_R, kind="stable")
    return _divided(member_R[in_order], visit_R[in_order], size)


def _cut_in_turn(rows: Rows, chosen_R: Mask, size: int, selection: Selection) -> Groups:
    """Like `_cut`, with a prompt's rows sorted: the least used come first, so that each gets its turn, and equally used
    ones follow `draw.order`. A priority already includes uses."""
    member_R = np.flatnonzero(chosen_R)
    uses_R, order, by = rows.uses_R[member_R], selection.draw.order, list[npt.NDArray]()
    if order == "uniform":
        shuffled = np.random.default_rng(stream_seed(selection.seed, selection.now, 1)).permutation(len(rows.id_R))
        by = [shuffled[member_R], uses_R]
    elif order == "newest":
        by = [-member_R, uses_R]
    else:
        alone = Groups(member_R, np.arange(len(member_R)), np.ones_like(member_R))
        by = [member_R, -_priority(rows, alone, selection)]
    in_order = np.lexsort((*by, rows.key_R[member_R]))
    return _divided(member_R[in_order], rows.key_R[member_R[in_order]], size)


def _divided(member_R: npt.NDArray[np.int64], unit_R: npt.NDArray, size: int, newest_whole: bool = False) -> Groups:
    """Divide adjacent members of the same unit into groups of the given size."""
    first_K = _run_starts(unit_R)
    rows_K = np.diff(first_K, append=len(member_R))
    groups_K = -(-rows_K // size)
    begin_K = first_K + rows_K - groups_K * size if newest_whole else first_K
    start_P = np.maximum(np.repeat(begin_K, groups_K) + size * _count_up(groups_K), np.repeat(first_K, groups_K))
    return Groups(member_R, start_P, np.diff(start_P, append=len(member_R)))


def _run_starts(value_R: npt.NDArray) -> npt.NDArray[np.int64]:
    """Indices at which runs of equal values start."""
    return np.append(np.zeros(min(1, len(value_R)), np.int64), np.flatnonzero(value_R[1:] != value_R[:-1]) + 1)


def _count_up(length_K: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, 2, … restarting for each length.

    >>> _count_up(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(length_K.sum()) - np.repeat(np.cumsum(length_K) - length_K, length_K)


def _filtered(rows: Rows, groups: Groups, selection: Selection, passed: Passed, written: bool = False) -> Groups:
    """The groups that are neither incomplete nor flat. `written`: the run forms them from its own visits."""
    complete_P = groups.size_P >= selection.least
    short_R = np.repeat(~complete_P, groups.size_P)
    passed.incomplete(rows.admission_R[groups.member_R[short_R]], written)
    if selection.draw.min_spread > 0 and len(complete_P):
        reward_R = rows.reward_R[groups.member_R]
        spread_P = np.maximum.reduceat(reward_R, groups.start_P) - np.minimum.reduceat(reward_R, groups.start_P)
        flat_P = complete_P & (spread_P < selection.draw.min_spread)
        passed["flat"] += int(groups.size_P[flat_P].sum())
        complete_P = complete_P & ~flat_P
    return Groups(groups.member_R, groups.start_P[complete_P], groups.size_P[complete_P])


def _ranked(rows: Rows, groups: Groups, selection: Selection, order: Order) -> npt.NDArray[np.int64]:
    """Indices of the groups, in the order in which they are drawn."""
    if order == "uniform":
        return np.random.default_rng(stream_seed(selection.seed, selection.now)).permutation(len(groups))
    first_P = rows.id_R[groups.member_R[groups.start_P]]
    if order == "first" and selection.by_admission:
        return _best(-rows.admission_R[groups.member_R[groups.start_P]], first_P, selection.most)
    if order == "first":
        return _best(-first_P, first_P, selection.most)
    if order == "newest":
        return _best(rows.id_R[groups.member_R[groups.start_P + groups.size_P - 1]], first_P, selection.most)
    return _best(_priority(rows, groups, selection), first_P, selection.most)


def _best(score_P: npt.NDArray, first_P: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """Indices of the highest scores in order, at least `most` of them; among equal ones, the earlier first."""
    if 0 < most < len(score_P):
        place_P = np.flatnonzero(score_P >= np.partition(score_P, -most)[-most])
    else:
        place_P = np.arange(len(score_P))
    return place_P[np.lexsort((first_P[place_P], -score_P[place_P]))]


def _priority(rows: Rows, groups: Groups, selection: Selection) -> npt.NDArray[np.float64]:
    """log2 of 2^(−age / half_life) / (1 + uses), with the group's mean age and mean uses. No age counts as 0."""
    age_P, uses_P = np.zeros(len(groups), np.int64), np.zeros(len(groups), np.int64)
    in_order = len(groups.member_R) == len(rows.id_R) and bool((np.diff(groups.member_R) > 0).all())
    for place in range(
        groups.size_P.max(initial=0)
    ):  # one member of every group at a time: few iterations, and much faster
        with_P = slice(None) if place < groups.size_P.min() else np.flatnonzero(groups.size_P > place)
        member_P = groups.start_P[with_P] + place
        if not in_order:  # otherwise each row is its own index
            member_P = groups.member_R[member_P]
        version_P = rows.version_R[member_P]
        age_P[with_P] += np.where(version_P == NO_AGE, 0, selection.now - version_P)
        uses_P[with_P] += rows.uses_R[member_P]
    return -age_P / groups.size_P / selection.draw.half_life - np.log2(1 + uses_P / groups.size_P)
