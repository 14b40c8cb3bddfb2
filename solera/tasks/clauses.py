"""Decide which number of a clause counts: not one that is denied, in an addition or in a relative clause."""

from fractions import Fraction
from typing import NamedTuple

from solera.tasks import wording
from solera.tasks.offers import in_one_unit, offered, restated
from solera.tasks.searching import contains_any
from solera.tasks.sentences import LONGEST_SENTENCE
from solera.tasks.spelling import plain
from solera.tasks.terms import Quantity, quantities


class Reading(NamedTuple):
    """The number that a statement gives; `None` if it is not a single number."""

    value: Fraction | None


def live(said: str) -> list[Quantity]:
    """The quantities that are not denied."""
    found = quantities(said)
    return [item for item in found if not _is_denied(said, item)] if wording.may_deny(said) else found


def _is_denied(said: str, found: Quantity) -> bool:
    return bool(
        wording.NEGATED_BEFORE.search(said, max(0, found.start - 60), found.start)
        or wording.NEGATED_AFTER.match(said, found.end)
    )


def denied(sentence: str) -> set[Fraction | None]:
    sentence = sentence[-LONGEST_SENTENCE:]
    if not wording.may_deny(sentence):
        return set()
    said = plain(sentence)
    return {found.value for found in quantities(said) if _is_denied(said, found)}


def clause_value(said: str) -> Reading | None:
    """The last number of the last clause that is not part of an addition."""
    found = live(said)
    if not found:
        return None
    ends = [clause.start() for clause in wording.CLAUSE.finditer(said)]
    start = max((end for end in ends if end < found[-1].start), default=0)
    if start and _adds_to_earlier(said, start, found):
        return clause_value(said[:start])
    chosen = [item for item in found if item.start >= start]
    if later := wording.LATER.search(said, chosen[0].end):
        chosen = [item for item in chosen if item.start < later.start()]
    chosen = [
        item for item in chosen if not wording.COMPARISON.search(said, max(0, item.start - 40), item.start)
    ] or chosen
    main = [item for item in chosen if not _is_addition(said, item)]
    last = main[-1] if main else chosen[-1]
    return Reading(_beside_others(said, found, found.index(last)))


def _adds_to_earlier(said: str, start: int, found: list[Quantity]) -> bool:
    """Whether the last clause only adds to an earlier one: *13 buses, with 4 seats left*, *44 beads, 20 of them*."""
    if wording.PART_OF.match(said, found[-1].end):
        return found[0].end <= start
    if not wording.SIDE.match(said, start):
        return False
    last = [item for item in found if item.start >= start]
    return all(_is_addition(said, item) for item in last) and not all(
        _is_addition(said, item) for item in found[: -len(last)]
    )


def _is_addition(said: str, item: Quantity) -> bool:
    return wording.is_added(said[max(0, item.start - 40) : item.start])


def _beside_others(said: str, found: list[Quantity], place: int) -> Fraction | None:
    """The value of the chosen number, unless the text offers it as one of several."""
    last = found[place]
    if place and not in_one_unit(said, found[: place + 1]):
        if restated(said, found[place - 1], last):
            return found[place - 1].value
        if offered(said, found[place - 1], last):
            return None
    if place + 1 < len(found) and offered(said, last, found[place + 1]):
        return None
    return last.value


def without_relative_clauses(said: str) -> str:
    """*He has 11 pens, which he keeps in 2 cases* is about 11. A clause that gives a result is kept: *which makes
    36*."""
    if not contains_any(said, wording.RELATIVE_WORDS):
        return said
    shorter = wording.RELATIVE.sub(lambda clause: clause[0] if wording.RESULTING.search(clause[0]) else " ", said)
    shorter = wording.COMPARING.sub(" ", shorter)
    if shorter == said:
        return said
    return shorter if any(not _is_addition(shorter, item) for item in live(shorter)) else said
