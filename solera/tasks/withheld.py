"""Detect responses without a statement that contain numbers but no answer: they refuse, end in the middle, or repeat
themselves."""

import re

from solera.tasks import wording
from solera.tasks.final import SENTENCE_END, retraction
from solera.tasks.searching import contains_any
from solera.tasks.sentences import LONGEST_SENTENCE, sentences

REFUSAL_WITHIN = 400
"""Characters at the end of a response that are searched for a refusal."""
LONGEST_WORD = 12
FEWEST_WORDS = 4
"""If the last sentence has at least this many words but no number and no full stop, it counts as unfinished. Shorter
ones are closing phrases."""

_CANNOT = r"(?:can(?:['’]?t|not| not)|could(?:n['’]?t| not)|(?:am|are|was|were|is|['’]m|['’]re) (?:unable|not able) to)"
_SOLVE = (
    r"(?:(?:determin|answer|solv|calculat|comput|conclud|decid|provid)\w*|find|found|give|given|know|known|tell|say"
    r"|figure|work(?:ed)? out|complete)\b"
)
_REFUSAL = re.compile(
    rf"\b(?:i|we|you|one)(?: really| simply| just)?(?: | ?(?=['’])){_CANNOT} (?:\w+ly )?{_SOLVE}"
    rf"|\b(?:{_CANNOT}|not) be (?:\w+ly )?(?:determined|answered|solved|calculated|computed|known|found|decided)\b"
    rf"|\b(?:impossible|not possible|unable|no way|hard|difficult|not able) to {_SOLVE}"
    r"|\b(?:not|n['’]t)(?: \w+ly| so| too| 100 ?%)? (?:sure|certain)\b|\bun(?:sure|certain)\b"
    r"|\b(?:no|any) (?:idea|clue)\b"
    r"|\b(?:i|we) (?:really )?(?:do not|don['’]?t|did not|didn['’]?t) (?:\w+ )?(?:know|understand)\b"
    r"|\b(?:not|n['’]t|insufficient|missing|lack\w*|too little|incomplete|without|needs?) (?:\w+ ){0,2}(?:information"
    r"|info|data|details|context)\b"
    r"|\bi (?:have to |must |will )?give up\b|\bwho knows\b|\bno (?:\w+ )?(?:answer|solution)\b|\bambiguous\b"
    r"|\b(?:it|that|this|the answer) (?:all )?depends\b|\bpick (?:one|the)\b"
    r"|\bno (?:se|lo) (?:puede|sé)\b|\bno s[eé]\b|\bnicht (?:\w+ )?(?:bestimm|berechn|sicher|lösbar|beantwort|sagen)"
    r"|\bweiß (?:ich |es )*nicht\b|\bne (?:sais|peut|peux) pas\b|\bimpossible de\b|无法|不知道|不确定|不能确定"
)
_REFUSING = (
    "not ", "n't", "n’t", "cant ", "dont ", "unable", "impossible", "no way", "hard to", "difficult to", "unsure",
    "uncertain", "idea", "clue", "info", "data", "detail", "context", "give up", "who knows", "no answer",
    "no solution", "ambiguous", "depends", "pick ", "no se ", "no sé", "no lo ", "nicht", "ne sais", "ne peu", "无法",
    "不",
)  # fmt: skip
"""Every refusal contains one of these words. They are searched first, because the pattern costs a hundred times as
much."""
_LAST_WORD = re.compile(r"(?:[A-Za-z]+|[=+×÷])$")
_CLAUSE_END = re.compile(r"[\n.!?,;:(—–-](?:(?<=\n)|\W*\w)")
_NO_DIGITS, _WORD = re.compile("[^0-9]*"), re.compile("[A-Za-z]{2,}")
_COMMITTED = re.compile(r"\b(?:but|however|though|so|therefore|thus|then|guess)\b|=")
_GUESSING = ("could", "might", "may be", "maybe", "perhaps", "possibly", "either")
_GUESS = r"\b(?:could|might|may|maybe|perhaps|possibly|either)\b[^\n0-9=]{0,25}[0-9][0-9.,]*+"
_GUESSES = re.compile(rf"{_GUESS}[^\n0-9=]{{0,40}}{_GUESS}[^0-9=]*$")
_ENTRY = r"\n[ \t]*(?:[-•*]|\(?(?:[0-9]{1,2}|[a-j])[.)])[ \t]+[$]?[0-9][0-9.,]*+[ \t]*"
_LISTED = re.compile(rf"{_ENTRY}{_ENTRY}\s*$")
"""A list of bare numbers at the end: options or guesses."""

_DRESS = " \t\r\n*_`$\\"
_HANGING = {
    "the", "an", "a", "of", "and", "or", "is", "are", "was", "were", "be", "will", "would", "which", "because",
    "since", "their", "my", "your", "our", "its", "if", "per", "than", "by", "equals", "=", "+", "×", "÷",
}  # fmt: skip
"""Words and signs that never end a sentence."""
_WAITING = {
    "to", "in", "on", "at", "for", "with", "from", "into", "between", "her", "his", "that", "this", "these", "how",
    "each", "all", "some", "has", "have", "can", "then", "so", "find", "calculate", "compute", "add", "subtract",
    "multiply", "divide", "need", "we", "she", "he", "they", "I", "get", "give", "gives", "make", "makes", "leave",
    "leaves", "means", "totals",
}  # fmt: skip
"""Words that may end a sentence with a number, but never one without."""
_ANNOUNCED = re.compile(
    r"(?i)[\s*_>-]*+(?:####[^\w$]*|(?:#+[\s*_]*+)?+(?:so,? )?(?:the |my )?(?:final )?answers?(?: is)?[\s:=*_#]*)"
)
"""An announcement without its answer. The possessive repeats and the `#+` prevent quadratic time on long runs of `*`,
`_` and spaces."""
_EMPTY_HEADING = re.compile(r"(?i)#{1,6}[\s*_]*(?:step|part|solution|calculation|conclusion|final|answer|total|result)")
_CLOSING = re.compile(r"(?i)\W*(?:(?:that|this|which|it)(?: is|['’]s)|i?\s?hope|thanks?|good|great|enjoy|have)\b")


def refuses(text: str) -> bool:
    """Whether the text ends with guesses, a refusal or a retraction. A refusal does not count if a word such as *but*
    leads to a number after it.

    >>> refuses("Ann has 7 cats. I don't know how many dogs."), refuses("I don't know the rule, but 3 + 4 = 7.")
    (True, False)
    """
    text = text[-REFUSAL_WITHIN:].lower()
    if (contains_any(text, _GUESSING) and _GUESSES.search(text)) or _LISTED.search(text[-80:]):
        return True
    digit = len(text) - 1 - _NO_DIGITS.match(text[::-1]).end()  # type: ignore[union-attr]
    if _is_taken_back(text[digit + 1 :]):
        return True
    text = text[max(text.rfind(". ", 0, digit), text.rfind("\n", 0, digit)) + 1 :] if digit >= 0 else text
    if not contains_any(text, _REFUSING):
        return False
    return any(_is_last_word(text, refusal) for refusal in _REFUSAL.finditer(text))


def _is_taken_back(after: str) -> bool:
    """Whether the text after the last number retracts it. Usually no second clause follows."""
    taken_back = retraction(after) if _CLAUSE_END.search(after) else None
    return taken_back is not None and "sorry" not in taken_back[0]


def _is_last_word(text: str, refusal: re.Match[str]) -> bool:
    end = SENTENCE_END.search(text, refusal.end())
    place = len(text) if end is None else end.start()
    committed = _COMMITTED.search(text, refusal.end(), place)
    if committed is not None and wording.has_number(text[committed.end() : place]):
        return False
    return not wording.has_number(text[place:])


def breaks_off(text: str) -> bool:
    """Whether the last sentence is unfinished and lacks its number, or the text repeats itself.

    >>> breaks_off("48 in April, 24 in May. We find that the total number of"), breaks_off("So 48 + 24 = 72")
    (True, False)
    """
    text = text.rstrip(_DRESS)
    if text.endswith(("...", "…")):
        text = text.rstrip(" .…")
    elif text.endswith((".", "!", "?")):
        return "####" in text[-20:] and _ANNOUNCED.fullmatch(text[text.rfind("####") :]) is not None
    start, on_its_line = _last_sentence(text)
    last = text[start:].strip()
    end = _LAST_WORD.search(last[-LONGEST_WORD:])
    if (end and end[0] in _HANGING) or _ANNOUNCED.fullmatch(last) or _is_empty_heading(last):
        return True
    if wording.DIGIT.search(last):
        return _in_circles(text, last)
    many = on_its_line and len(_WORD.findall(last)) >= FEWEST_WORDS
    waits = many or last.endswith(":") or (end is not None and end[0] in _WAITING)
    return (waits and not _closes(last)) or _in_circles(text, last)


def _is_empty_heading(last: str) -> bool:
    """`## Part 2` with nothing below it, but not `## Total: 72`."""
    return _EMPTY_HEADING.match(last) is not None and not wording.DIGIT.search(wording.without_steps(last))


def _closes(last: str) -> bool:
    """Whether a sentence without a number may follow the answer."""
    return bool(_CLOSING.match(last) or wording.is_chatter(last) or wording.without_checks(last) != last)


def _last_sentence(text: str) -> tuple[int, bool]:
    """Where the last sentence begins, and whether another one precedes it on the same line."""
    line = text.rfind("\n") + 1
    start = line
    for end in SENTENCE_END.finditer(text, max(line, len(text) - LONGEST_SENTENCE)):
        start = end.end()
    return start, start > line


def _in_circles(text: str, last: str) -> bool:
    """Whether the last words begin a sentence that already occurs twice."""
    if " " not in last or text.count(last) < 3:
        return False
    longer = [said.strip() for said, _ in sentences(text) if len(said.strip()) > len(last)]
    begun = [said for said in longer if said.startswith(last)]
    return len(begun) > len(set(begun))


# Multiple choice.

_LETTER = re.compile("[A-J]")
_CHOSEN = re.compile(
    r"(?i:\b(?:option|choice|answer|letter|alternative)\b)(?: is| would be| must be|:)*[\s:*_($\\]*"
    r"(?i:(?:option|choice) )?\(?([A-J])\b[\s).*_$\\]*$"
)
_OPTION = re.compile(r"(?m)(?:^|(?<=[\s,;(]))\(?([A-J])[).:]\s+(\S[^\n]*?)(?=[,;]?\s+\(?[A-J][).:]\s|[,;.]?\s*$)")


def options(text: str) -> dict[str, str]:
    """The options that a text lists, by letter.

    >>> options("(A) 6\\n(B) 8 m"), options("Options: A. 20, B. 30.")
    ({'A': '6', 'B': '8 m'}, {'A': '20', 'B': '30'})
    """
    return {option[1]: option[2] for option in _OPTION.finditer(text)}


def chosen_option(text: str) -> str | None:
    """The text of the option whose letter a text ends with: *The correct option is (C).*"""
    chosen = _CHOSEN.search(text, max(0, len(text) - 80)) if _LETTER.search(text[-8:]) else None
    return options(text).get(chosen[1]) if chosen else None
