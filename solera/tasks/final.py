r"""Find the answer in a response. The graders `number`, `math` and `countdown` all use these rules:

1. Text before the last `</think>` is ignored, unless nothing follows it.
2. A *statement* is one of these: the content of `<answer>…</answer>` or of `\boxed{…}`, a line `#### ANSWER`, the
   sentence after "answer is", and the line after "Answer:" or after a heading "Final Answer".
3. A line after `####`, "Answer:" or such a heading must look like an answer: a value with a few words at most. Other
   headings, lists and steps of the calculation are not statements.
4. The last statement in the text counts, whatever its form. Empty and negated statements do not count.
5. A later retraction ("Wait, that is wrong") cancels a statement. Then only the text after the retraction counts.
6. A response without a statement is read as a whole. `number` finds no answer there if a box or tag was left empty.

`numbers.py` reads the number from a statement or from a whole response.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from solera.tasks.searching import ascii_folded, contains_any
from solera.tasks.wording import reason

READ = 50_000
"""Characters at the end of a text that are searched for an answer, so that megabytes of text cost nothing."""
LONGEST_LINE = 400
"""Longest line, in characters, that can be the answer after `####` or "Answer:"."""
LONGEST_BOX = 20_000
MOST_WORDS = 6
MOST_WORDS_BEFORE_NUMBERS = 3
"""Most words beside the value in such a line. If more numbers follow, fewer words are allowed, because the line may be
a step of the calculation."""
_CANDIDATES = 20
"""Number of statements that are considered, from the last one back."""
SIMPLE = re.compile(r"\s*(-?)\$?([0-9]{1,30}|[0-9]{1,3}(?:,[0-9]{3}){1,9})(\.[0-9]{1,30})?\s*")
"""A number and nothing else."""
_WORD, _DIGIT, _SPACED_MINUS = re.compile("[A-Za-z]{2,}"), re.compile("[0-9]"), re.compile(r"^[-−–] (?=\$?[0-9])")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_OPENING_TAG, _CLOSING_TAG = re.compile(r"(?i)<((?:final_?)?answer)>"), re.compile(r"(?i)</((?:final_?)?answer)>")
_FILLER = r"""(?:[\s:*_"'`“]|(?<=\n)>|(?:\\\[|\$\$|\\begin\{\w+\*?\})(?=\s*\n))"""
_VERB = (
    r"(?:is|are|was|were|equals|(?:should|must|will|would|has to|have to) be|(?:comes?|came|works? out|adds? up"
    r"|amounts?)"
    r" (?:out )?to)(?![a-z'’])"
)
_ADVERB = r"(?:(?:really|actually|clearly|simply|therefore|thus|then|here|now|also|certainly|definitely|obviously),? )?"
_NOT = (
    r"(?:(?:is|are|was|were|should|must|will|would|can|could|do|does)(?:n['’]?t|(?:n| )ot)(?: be| equal)?"
    r"|can['’]?t be)\b"
)
_PHRASE = re.compile(
    r"(?i)\banswers?(?: to (?:the|this|your|our) (?:\w+ )?(?:question|problem|exercise|task))?"
    rf"(?:(?P<negated>(?: {_ADVERB}{_NOT}|(?: is)? ?\$?(?:≠|!=|\\neq?\b)))"
    rf"|,? {_ADVERB}(?P<verb>{_VERB})(?P<colon> ?:)?|[\"'*_]{{0,3}}(?P<label> ?[:=]))(?P<filler>{_FILLER}{{0,20}})"
)
_HEADING = re.compile(
    r"(?im)^[ \t]*(?P<dress>#{1,6} ?|\*\*|__)?(?:\d+[.)] )?(?:the |my |so,? )?(?:final )?answers?"
    rf"[ \t]*+(?:\*\*|__|#+)?[ \t]*+\n{_FILLER}{{0,20}}"
)
_REASON = re.compile(r"(?i),?\s\(?(?:because|since)\b.*")
SENTENCE_END = re.compile(
    r"[\n.!?](?:(?<=\n)|(?<!\bapprox\.)(?<!\b(?:Rs|No|Mr|Ms|Dr|St|ca|vs)\.)(?<!\bMrs\.)(?<!\b(?:i\.e|e\.g|a\.m"
    r"|p\.m)\.)(?=[\"'”’*_)`$]{0,4}(?:\s|$)))"
)
_LIST_ITEM = re.compile(
    r"[ \t]*(?:[-•*] +|\(?[0-9]{1,2}[.)][ \t]+(?=[^\s0-9])|\(?[a-h]\)[ \t]+(?=[A-Za-z])|step\b)", re.IGNORECASE
)
_DRESS = re.compile(r"\\(?:left|right|displaystyle|text\w*|math\w+|mbox|[A-Za-z]+)(?![A-Za-z])|[*_`]{1,3}|\([^()]*\)")
_LABEL = re.compile(
    r"(?i)\s*(?:(?:so|thus|hence|therefore|and)\b,? *)?(?:(?:the )?(?:(?:final|grand) )?"
    r"(?:answer|total|result|sum|ans|value)\b(?: is\b| of\b)? *[:=]? *)?(?:[a-z]\w? *(?:=|\\in) *)?"
)
_VALUE_FIRST = re.compile(
    r"(?i)(?:\(?[a-j][).:] )?[\s$€£¥₹\\%({\[\"'~≈=#<+\-−–*]*(?:(?:about|approx\w*\.?|around|exactly|roughly|only"
    r"|just|negative|minus|usd|rs\.?|us|a)\s*)?"
    r"[\s$€£¥₹\\({\[+\-−–.]*(?:[0-9¼½¾⅐-⅞０-９√π∞]|frac|sqrt|(?:zero|one|two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve"
    r"|[a-z]+teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|half|hundred)\b)"
)
_NUMBERED = re.compile(r"[\s(]*[0-9]{1,2}(?:[.)]|:(?![0-9])) *[A-Za-z*]|[\s(]*[0-9]{1,3}(?:st|nd|rd|th)\b")
VERBS = re.compile(
    r"(?i)\b(?:is|are|was|were|be|been|has|have|had|will|would|can|could|does?|did|sold|makes?|made|gets?|got|goes"
    r"|went"
    r"|gives?|gave|takes|took|needs?|buys|bought|costs?|means?|[a-z]{2,}ed)\b"
)
_HEADINGS = re.compile(
    r"(?i)\W*(?:step|part|explanation|solution|conclusion|reasoning|working|workings|check|verification|notes?"
    r"|summary"
    r"|details|calculations?|problem|question|given|approach|method|analysis|breakdown|justification|proof|final"
    r"|answer)\b"
)
_RETRACTION = re.compile(
    r"(?:^|(?<=[.!?\n*(—–])|(?<=[.!?:;,] )|(?<=- )|(?<=— )|(?<=– ))[^\S\n]*+(?i:"
    r"(?:but |oh |hmm+,? |no,? )?wait\b(?= ?[,.!:;—–-]|…|\s+(?:no|that|this|i)\b)|actually,|correction\b|(?:sorry"
    r"|oops|whoops)\b|scratch that"
    r"|no, (?!worries)|let me (?:re-?(?:do|calculate|compute|count|consider|think|check that again)|correct|fix"
    r"|try again)\b"
    r"|(?:but |hmm,? )?(?:that|this|it)(?:['’]s| is| was| isn['’]t| is not| wasn['’]t| can['’]t be) (?:wrong"
    r"|incorrect|not right|not correct"
    r"|right|correct|a mistake|an error"
    r"|the wrong)(?<!is right)(?<!is correct)(?<!s right)(?<!s correct)(?<!was right)(?<!was correct)"
    r"|(?:but )?i (?:made|forgot|miscalculated|misread|miscounted)\b)"
)


_RETRACTING = (
    "wait", "actually,", "correct", "sorry", "oops", "scratch that", "no, ", "let me ", "wrong", "right", "mistake",
    "error", "i made", "i forgot", "i mis",
)  # fmt: skip


def retraction(text: str, start: int = 0) -> re.Match[str] | None:
    """Find the first retraction after `start`. The words that every retraction contains are searched first, because the
    pattern is slow."""
    return _RETRACTION.search(text, start) if contains_any(text[start:].lower(), _RETRACTING) else None


class Final(NamedTuple):
    """The part of a text that states its answer, how it was found, whether the following text shows that it is
    complete, and where it begins and ends."""

    text: str
    by: str
    complete: bool
    start: int = 0
    end: int = 0


def final_answer(text: str, phrases: bool = True) -> Final:
    r"""Return the last statement of a text, or the whole text if there is none.

    >>> final_answer("so <answer> 4 </answer> it is")[:3], final_answer(r"\boxed{1}. So \boxed{\frac{3}{4}}").text
    ((' 4 ', 'tag', True), '\\frac{3}{4}')
    >>> final_answer("#### 12\nDone")[:3], final_answer("The answer is 3.5 m. I checked it twice.").text
    (('12', 'mark', True), '3.5 m')
    """
    text = spoken(text)
    for found in statements(text, phrases):
        if not hollow(found.text):
            taken_back = retraction(text, found.end)
            return found if taken_back is None else _whole(text, taken_back.end())
    return _whole(text, 0)


def _whole(text: str, start: int) -> Final:
    return Final(text[start:], "whole", False, start, len(text))


def affirmed(text: str) -> str:
    r"""Return a text without what it denies.

    >>> affirmed(r"It is not 72, $x \neq 3$.").split()
    ['It', 'is', ',', '$x', '.']
    """
    return _DENIED.sub(" ", text)


def spoken(text: str) -> str:
    return after_thinking(text[-READ:])


_STATING = ("boxed", "fbox", "####", "answer")
"""Every statement has one of these words."""


def statements(text: str, phrases: bool = True) -> Iterator[Final]:
    """Yield the statements of a text, last first. Only places with a word such as "boxed" are examined."""
    if not contains_any(ascii_folded(text), _STATING):
        return
    folded = text.lower()
    if len(folded) != len(text):  # İ becomes two characters, which shifts positions
        folded = text
    answer_at = _tag_or_phrase_at if phrases else _tag_at
    kinds = {"boxed": _boxed_at, "fbox": _boxed_at, "####": _mark_at, "answer": answer_at}
    places = {word: folded.rfind(word) for word in kinds if word in folded}
    if not places:
        return
    for _ in range(_CANDIDATES):
        word = max(places, key=lambda word: places[word])
        place = places[word]
        if place < 0:
            return
        found = None if "bo" not in word and _is_boxed(text, folded, place) else kinds[word](text, place)
        if found is not None:
            yield found
            place = min(place, found.start)
            places = {
                word: folded.rfind(word, 0, min(last, place) + len(word)) if last >= place else last
                for word, last in places.items()
            }
        places[word] = folded.rfind(word, 0, place)


def _is_boxed(text: str, folded: str, place: int) -> bool:
    """Whether a position is inside a box, whose words belong to the content of the box."""
    before = folded.rfind("boxed", 0, place)
    box = _BOXED.match(text, before - 1) if before > 0 else None
    return box is not None and place < (found := _box(text, box)).end and found.complete


def _tag_at(text: str, place: int) -> Final | None:
    closing = _CLOSING_TAG.search(text, max(0, place - 8), place + 7)
    if closing is None:
        return None
    opening = last_match(re.compile(f"(?i)<{closing[1]}>"), text, 0, closing.start())
    if opening is None:
        return None
    content, start = text[opening.end() : closing.start()], opening.start()
    if (
        other := _OFFERED.search(text, max(0, start - 200), start)
    ) is not None:  # <answer>1</answer> or <answer>2</answer>
        return Final(f"{other[1]}, {content}", "tag", True, other.start(), closing.end())
    for inner in statements(content):
        if not hollow(inner.text):
            return inner._replace(complete=True, start=opening.start(), end=closing.end())
    return Final(content, "tag", True, opening.start(), closing.end())


_OFFERED = re.compile(r"(?i)<answer>([^<>]*)</answer>\s*(?:or|and|,|;|/)\s*$")


def _tag_or_phrase_at(text: str, place: int) -> Final | None:
    return _tag_at(text, place) or _phrase_at(text, place) or _heading_at(text, place)


def _boxed_at(text: str, place: int) -> Final | None:
    match = _BOXED.match(text, place - 1) if place else None
    if match is None:
        return None
    box, contents = _box(text, match), dict[str, None]()
    contents[box.text.strip()] = None
    for _ in range(_CANDIDATES):  # several boxes in a row are one statement
        before = text.rfind("boxed", 0, box.start)
        earlier = _BOXED.match(text, before - 1) if before > 0 else None
        other = None if earlier is None else _box(text, earlier)
        if other is None or not other.complete or not _BETWEEN_BOXES.fullmatch(text, other.end, box.start):
            break
        contents[other.text.strip()] = None
        box = box._replace(start=other.start)
    values = [content for content in contents if not hollow(content)]
    return (
        box._replace(text=", ".join(reversed(values)))
        if len(values) > 1
        else box._replace(text=values[0] if values else "")
    )


def _box(text: str, match: re.Match[str]) -> Final:
    depth = 1
    for brace in _BRACE.finditer(text, match.end(), match.end() + LONGEST_BOX):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is a character of the answer
        if depth == 0:
            return Final(text[match.end() : brace.start()], "boxed", True, match.start(), brace.end())
    return Final(text[match.end() :], "boxed", False, match.start(), len(text))


_BETWEEN_BOXES = re.compile(
    r"(?:[\s,;.$&()\[\]\\]|\b(?:and|or|quad|qquad|text|also)\b|[{}]|\b[a-zA-Z](?:_\w)?\s?=){0,40}"
)
_WORDS_ONLY = re.compile(r"[A-Za-z\s:*_'’,-]+")
_BODY = re.compile(r"\n(?!\s*(?:#|(?:explanation|check|note|working|solution)\b))[^\n]*[0-9]", re.IGNORECASE)
"""The text after a heading: a line with numbers."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _mark_at(text: str, place: int) -> Final | None:
    """`#### 72` is an answer, `#### Step 2: Total` and `#### Explanation` are headings."""
    start = place + 4
    while text.startswith("\n", start) or text.startswith(" ", start) or text.startswith("\r", start):
        start += 1
    end = text.find("\n", start)
    line, newline = (text[start:], False) if end < 0 else (text[start:end], True)
    inline = line.find("####")
    line = line if inline < 0 else line[:inline]
    end = start + len(line)
    rest = text[end:].strip(" \n*_`")
    line = _SPACED_MINUS.sub("-", line)
    if len(_WORD.findall(line)) > 1 and _BODY.match(text, end):
        return None
    if not is_bare(line, rest) or (rest and _WORDS_ONLY.fullmatch(line)):
        return None
    return Final(_without_reason(line), "mark", newline, place, end)


def _phrase_at(text: str, place: int) -> Final | None:
    phrase = _PHRASE.match(text, place)
    if phrase is None:
        return _named_before(text, place)
    said, complete = sentence(text, phrase.end())
    end = phrase.end() + len(said)
    if phrase["negated"]:
        return Final("not " + said, "phrase", complete, place, end)
    if (phrase["label"] or phrase["colon"]) and not _labels_answer(text, phrase, said):
        return None
    if phrase["verb"] == "would be" and _SUPPOSED.search(text, max(0, place - 150), place):
        return None
    if _DOUBT.search(text, max(0, place - 60), place):
        return Final("not " + said, "phrase", complete, place, end)
    return Final(_without_reason(said), "phrase", complete, place, end)


def _labels_answer(text: str, phrase: re.Match[str], said: str) -> bool:
    """Whether the line or sentence after "Answer:" is an answer, not a list."""
    rest = text[phrase.end() + len(said) :].strip()
    line = text[phrase.end() : phrase.end() + LONGEST_LINE].partition("\n")[0]
    listed = is_item(line) and ("\n" in phrase["filler"] or re.search(r"\s2[.)]\s", rest))
    listed = listed or (line.startswith(("a)", "(a)")) and "\nb)" in rest.replace("(", ""))
    return not listed and (is_bare(line, rest) or is_bare(said, rest))


_DOUBT = re.compile(
    r"(?i)(?:(?:n['’]t|\bnot) (?:think|believe|sure|certain|say|know|true|claim|agree|see|the case)|\b(?:doubt"
    r"|unlikely|false|wrong) (?:that|if|whether)|\bno way|\b(?:might|may|could|would) (?:think|say|guess|assume"
    r"|believe))"
    r"\b[^.\n:;]{0,30}$"
)
_SUPPOSED = re.compile(r"(?i)\bif\b[^.!?\n]*$")
_NAMING = r" (?:is|was|would be|should be|must be|as) (?:the|our|my|your)(?: (?:final|correct|right))? $"
_NAMED, _NAMED_END = re.compile(r"(?i)([^\n.;,:]{1,40}?)" + _NAMING), re.compile("(?i)" + _NAMING)
"""`72 is the` before *answer*, and its end, which is searched first, because the whole pattern is slow."""


def _named_before(text: str, place: int) -> Final | None:
    """`72 is the answer`."""
    if not _NAMED_END.search(text, max(0, place - 30), place):
        return None
    named = _NAMED.search(text, max(0, place - 60), place)
    if named is None:
        return None
    _, complete = sentence(text, place)
    return Final(named[1], "phrase", complete, named.start(), place + len("answer"))


def _heading_at(text: str, place: int) -> Final | None:
    line = text.rfind("\n", 0, place) + 1
    heading = _HEADING.match(text, line)
    if heading is None or heading.end() <= place:
        return None
    said, newline, rest = text[heading.end() :].partition("\n")
    if not is_bare(said, rest):
        return None
    return Final(_without_reason(said), "phrase", bool(newline), place, heading.end() + len(said))


def is_bare(line: str, rest: str) -> bool:
    """Whether a line is an answer, not a heading, a list item or a step of the calculation. `rest` follows the line.

    >>> is_bare("72 clips", ""), is_bare("She sold 48/2 = 24 in May.", ""), is_bare("2. Total", "48 + 24 = 72")
    (True, False, False)
    """
    if SIMPLE.fullmatch(line):
        return True
    if not line.strip() or len(line) > LONGEST_LINE or is_item(line):
        return False
    plain = _DRESS.sub(" ", _without_reason(line))
    value = _VALUE_FIRST.match(line, _LABEL.match(line).end())  # type: ignore[union-attr]
    words = _WORD.findall(plain)
    if value is None:
        named = words and _DIGIT.search(plain)  # May: 24
        return not named and len(words) <= 2 and not _HEADINGS.match(line) and not VERBS.search(plain)
    most = MOST_WORDS_BEFORE_NUMBERS if _DIGIT.search(rest) else MOST_WORDS
    if len(words) > most or VERBS.search(plain, value.end() if value.end() < len(plain) else 0):
        return False
    if words and words[0].istitle() and _DIGIT.search(rest) and not _LABEL.match(line)[0].strip():  # type: ignore[index]
        return False
    return not ("=" in line and "=" in rest)


def _without_reason(said: str) -> str:
    """A statement or line up to *because* or *since*."""
    return _REASON.sub("", said) if reason(said) else said


def is_item(line: str) -> bool:
    return bool(_LIST_ITEM.match(line) or _NUMBERED.match(line))


def hollow(content: str) -> bool:
    """Whether a statement is empty, or says only what the answer is not."""
    return not _LAYOUT.sub("", content) or _DENYING.match(content) is not None


_DENIAL = r"(?:\bnot\b|n['’]t\b|\\neq?\b|≠|!=)"
_DENIED = re.compile(rf"(?i){_DENIAL}(?: (?:be|equal(?: to)?|is))? ?(?:\$[^$\n]{{1,80}}\$|[^\s,;]{{1,80}}(?<![.}}]))")
_DENYING = re.compile(r"(?i)(?:\s|[$*_]|\\text\s*\{)*(?:not\b|\\neq?\b|≠|!=)")
_LAYOUT = re.compile(r"\\(?:text|mathrm|mathbf)(?=\{\s*\})|\\(?:q?quad\b|[,;:! ()\[\]])|[\s{}$~.*_`?-]")


def sentence(text: str, start: int) -> tuple[str, bool]:
    """Return the sentence that starts here, and whether a next sentence or line shows that it has ended."""
    end = SENTENCE_END.search(text, start)
    if end is None:
        return text[start:], False
    return text[start : end.start()], end.end() < len(text) or end[0] == "\n"


def after_thinking(text: str) -> str:
    """The text after the last `</think>`, or the whole text if nothing follows."""
    _, _, said = text.rpartition("</think>")
    return said if said.strip() else text


def boxed_answer(text: str) -> Final | None:
    r"""The content of the last `\boxed{…}`. If its brace never closes: the rest of the text, marked as incomplete."""
    text = text[-READ:]
    match = last_match(_BOXED, text)
    return None if match is None else _box(text, match)


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>…</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def last_match(pattern: re.Pattern[str], text: str, *between: int) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text, *between):  # noqa: B007
        pass
    return found
