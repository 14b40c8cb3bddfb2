"""Where in a response its answer stands."""

import re
from typing import NamedTuple

READ = 50_000
"""Characters at the end of a text in which an answer is looked for, so that megabytes cost nothing."""
_TAG = "<answer>", "</answer>"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_MARK = "####"
_PHRASE = re.compile(r"(?i)\banswers?(?: (?:is|are)\b(?! not\b)|:|\*\*:|:\*\*| =|=)[:\s*]{0,20}")
_REASON = re.compile(r"(?i),?\s(?:because|since)\b.*")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")


class Final(NamedTuple):
    """The part of a text that states its answer, how it was found, and whether what follows shows it is complete."""

    text: str
    by: str
    complete: bool


def final_answer(text: str, phrases: bool = True) -> Final:
    r"""What stands inside the last `<answer>…</answer>`, and within that, or else within the text, inside the last
    `\boxed{…}`, else on the line after the last `####`, else in the sentence after the last "answer is" or "answer:",
    else the whole.

    >>> final_answer("so <answer> 4 </answer> it is"), final_answer(r"\boxed{1} or \boxed{\frac{3}{4}}").text
    (Final(text=' 4 ', by='tag', complete=True), '\\frac{3}{4}')
    >>> final_answer("#### 12\nDone"), final_answer("The answer is 3.5 m. I checked it twice.").text
    (Final(text='12', by='mark', complete=True), '3.5 m')
    """
    text = after_thinking(text[-READ:])
    tagged = tagged_answer(text)
    if tagged is not None:
        inner = final_answer(tagged, phrases)
        return inner._replace(by="tag" if inner.by == "whole" else inner.by, complete=True)
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    _, mark, after = text.rpartition(_MARK)
    if mark:
        line, newline, _ = after.lstrip().partition("\n")
        return Final(_REASON.sub("", line), "mark", bool(newline))
    phrase = _last_phrase(text) if phrases else None
    if phrase is not None:
        said, complete = sentence(text, phrase.end())
        return Final(_REASON.sub("", said), "phrase", complete)
    return Final(text, "whole", False)


def _last_phrase(text: str) -> re.Match[str] | None:
    """The last match of `_PHRASE`, from the end backwards, looked at only where the word stands."""
    folded = text.casefold()
    if len(folded) != len(text):  # ß became ss: places are others
        return last_match(_PHRASE, text)
    place = len(text)
    while (place := folded.rfind("answer", 0, place)) >= 0:
        if phrase := _PHRASE.match(text, place):
            return phrase
    return None


def sentence(text: str, start: int) -> tuple[str, bool]:
    """The sentence from a place on, and whether a next one or a next line shows that it has ended."""
    end = _SENTENCE_END.search(text, start)
    if end is None:
        return text[start:], False
    return text[start : end.start()], end.end() < len(text) or end[0] == "\n"


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text where nothing does."""
    _, _, said = text.rpartition("</think>")
    return said if said.strip() else text


def boxed_answer(text: str) -> Final | None:
    r"""What stands inside the last `\boxed{…}`; the rest of the text, not complete, where its brace never closes."""
    text = text[-READ:]
    match = last_match(_BOXED, text)
    if match is None:
        return None
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[match.end() :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is a character of the answer
        if depth == 0:
            return Final(text[match.end() : match.end() + brace.start()], "boxed", True)
    return Final(text[match.end() :], "boxed", False)


def tagged_answer(text: str) -> str | None:
    """What stands inside the last `<answer>…</answer>`."""
    end = text.rfind(_TAG[1])
    start = text.rfind(_TAG[0], 0, end) if end >= 0 else -1
    return text[start + len(_TAG[0]) : end] if start >= 0 else None


def last_match(pattern: re.Pattern[str], text: str, *between: int) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text, *between):  # noqa: B007
        pass
    return found
