"""First in, first out: which groups can be formed from rollouts that were never used.

The rollouts that the run generated for one visit of the task's stream (`Rollout.admission`) form their own group.
Combined with those of another visit, the group would mix answers of several policies. Once a step has used a later
visit, the rest of an earlier one is a leftover and is not drawn any more. Imported rollouts belong to no visit: those
of one prompt fill one group after the other.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from heapq import nsmallest
from itertools import islice
from math import inf

Unused = tuple[int, str, int | None]
"""Id, prompt key and admission of a rollout."""
Filling = dict[tuple[str, int | None], list[int]]
"""Members of incomplete groups, by prompt key and admission, in the order of their first members."""


class Queue:
    """How far training has come in the stream, and what was left over. Its input is the unused rollouts by id, without
    visits up to `reached`."""

    def __init__(self, reached: int, leftover: int) -> None:
        self.reached = reached
        """The last admission that a step has used; -1 if there is none."""
        self._leftover = leftover
        self._left_by_draw = 0
        self._drawn: dict[int, int] = {}
        self._left_out = set[int]()
        """Visits after `reached` that are not to be drawn."""

    @property
    def leftover(self) -> int:
        """Rewarded rollouts that will not be drawn any more, as of the last draw."""
        return self._leftover + self._left_by_draw

    def missing(self, unused: Iterable[Unused], groups: int, group_size: int) -> int:
        """Number of complete groups that are missing."""
        return groups - sum(1 for _ in islice(complete_groups(unused, group_size, {}), groups))

    def ready(self, unused: Iterable[Unused], group_size: int) -> set[int]:
        """The visits whose groups can be drawn."""
        visits = {visit for _, (_, visit), _ in complete_groups(unused, group_size, {}) if visit is not None}
        return visits - self._left_out

    def leave_out(self, visits: Iterable[int]) -> None:
        """Never draw these visits, whatever rewards they get."""
        self._left_out.update(visit for visit in visits if visit > self.reached)

    def draw(
        self, unused: Iterable[Unused], groups: int, group_size: int, by_admission: bool = False
    ) -> list[tuple[str, list[int]]]:
        """Key and members of the first complete groups, in the order of their first members. `by_admission`: in the
        order of their visits, without imported ones."""
        filling: Filling = {}
        if by_admission:
            first = earliest_groups(unused, groups, group_size, filling, self._left_out)
        else:
            first = first_groups(unused, groups, group_size, filling)
        self._drawn = {id_: visit for members, (_, visit) in first if visit is not None for id_ in members}
        last = max(self._drawn.values(), default=self.reached)
        self._left_by_draw = sum(len(ids) for (_, visit), ids in filling.items() if visit is not None and visit < last)
        return [(key, members) for members, (key, _) in first]

    def used(self, ids: Iterable[int]) -> None:
        """Record that a step has used these rollouts of the last draw."""
        reached = max((self._drawn[id_] for id_ in ids if id_ in self._drawn), default=self.reached)
        if reached > self.reached:
            self.reached, self._leftover, self._left_by_draw = reached, self.leftover, 0
            self._left_out = {visit for visit in self._left_out if visit > reached}


def complete_groups(
    unused: Iterable[Unused], group_size: int, filling: Filling
) -> Iterator[tuple[list[int], tuple[str, int | None], float]]:
    """Groups of equal key and admission, each as soon as its last member arrives: members, key, admission, and the
    oldest id that is still in an incomplete group. Incomplete groups stay in `filling`."""
    for id_, key, admission in unused:
        members = filling.setdefault((key, admission), [])
        members.append(id_)
        if len(members) == group_size:
            del filling[key, admission]
            yield members, (key, admission), next(iter(filling.values()), [inf])[0]


def first_groups(
    unused: Iterable[Unused], groups: int, group_size: int, filling: Filling
) -> list[tuple[list[int], tuple[str, int | None]]]:
    """Complete groups in the order of their first members. Stops reading once nothing that follows can come earlier."""
    first: list[tuple[list[int], tuple[str, int | None]]] = []
    for members, visit, oldest in complete_groups(unused, group_size, filling):
        insort(first, (members, visit), key=lambda group: group[0])
        del first[groups:]
        if len(first) == groups and (not first or first[-1][0][0] < oldest):
            break
    return first


def earliest_groups(
    unused: Iterable[Unused], groups: int, group_size: int, filling: Filling, left_out: Collection[int]
) -> list[tuple[list[int], tuple[str, int | None]]]:
    """Complete groups in the order of their visits. Those of visits in `left_out` stay in `filling`."""
    found: list[tuple[int, list[int], str]] = []
    for members, (key, visit), _ in complete_groups(unused, group_size, filling):
        if visit in left_out:
            filling[key, visit] = members
        elif visit is not None:
            found.append((visit, members, key))
    return [(members, (key, visit)) for visit, members, key in nsmallest(groups, found)]
