"""Split a response into sentences, and find those that may hold its result."""

import re
from collections.abc import Iterator

from solera.tasks import wording
from solera.tasks.final import SENTENCE_END

_GOES_ON = re.compile(r"\W{0,4}\s+[a-z]")
LONGEST_SENTENCE = 600
"""Characters at the end of a sentence that are read."""


def numeric_sentences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield sentences with a number, last first, and whether they have ended. Checks and lines in brackets are left out
    unless nothing else has a number. Numbers of steps and list items, and closing words, are always left out."""
    for with_checks in (False, True):
        any_found = False
        for line in _lines(text):
            for sentence, complete in reversed(list(sentences(line if with_checks else _unchecked(line)))):
                said = sentence[-LONGEST_SENTENCE:]
                if not wording.has_number(said):
                    continue
                unnumbered = wording.without_steps(said)
                if (unnumbered is said or wording.has_number(unnumbered)) and not wording.is_chatter(unnumbered):
                    any_found = True
                    yield unnumbered, complete
        if any_found:
            return


def _lines(text: str) -> Iterator[str]:
    """Lines with a number, last first, without list markers."""
    end = len(text)
    while end > 0:
        start = text.rfind("\n", 0, end - 1 if text[end - 1] == "\n" else end) + 1
        line = text[start:end]
        if wording.has_number(line):
            yield line[wording.ITEM.match(line).end() :]  # type: ignore[union-attr]
        end = start


def _unchecked(line: str) -> str:
    return "" if wording.BRACKETED.fullmatch(line) else wording.without_checks(line)


def sentences(text: str) -> Iterator[tuple[str, bool]]:
    """Each sentence, and whether the following text shows that it has ended."""
    start = 0
    for end in SENTENCE_END.finditer(text):
        if end[0] == "\n" or not _GOES_ON.match(text[end.end() : end.end() + 6]):
            yield text[start : end.start()], end.end() < len(text) or end[0] == "\n"
            start = end.end()
    yield text[start:], False
