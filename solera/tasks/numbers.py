r"""The grader `number`: find the number that a response gives. `final.py` finds its statement.

In a statement:

- An equation gives its right side, and a term without one is evaluated: `48 + 24` is 72, never 48 or 24.
- A number that is negated does not count: `not 72`, `\neq 72`, `72 is wrong`.
- Remarks in brackets and reasons are ignored.
- If the statement begins with a number, that number counts; otherwise the result of a sentence (below).
- Several numbers (`72 or 74`, `72, 74`, `70-74`, `between 70 and 74`) give no number, and neither do `5:30`,
  `x > 72` and `2 h 30 min`.

In a response without a statement, the last sentence with a number counts: the right side of its last equation, or what
follows a word such as *so*. Otherwise it is the last number of its last clause that is not part of an addition such as
*in 2 months*. Checks ("Check: 72 - 24 = 48"), numbers of list items and steps, relative clauses and closing phrases are
ignored. There is no answer if a box or tag is empty, or if the response refuses or ends in the middle (`withheld.py`).
`clauses.py` decides which number of a clause counts.

If the last sentence after a statement begins with *In total*, *Therefore* or the like and has one result, it counts
instead.
"""

import re
from fractions import Fraction
from functools import lru_cache
from math import factorial

from solera.tasks import wording
from solera.tasks.clauses import Reading, clause_value, denied, live, without_relative_clauses
from solera.tasks.final import (
    SIMPLE,
    VERBS,
    Final,
    hollow,
    is_bare,
    retraction,
    sentence,
    spoken,
    statements,
)
from solera.tasks.offers import several
from solera.tasks.searching import contains_any
from solera.tasks.sentences import numeric_sentences, sentences
from solera.tasks.spelling import TENS, WORDS, plain, with_digits
from solera.tasks.terms import LONGEST_NUMBER, Quantity, quantities
from solera.tasks.withheld import breaks_off, chosen_option, options, refuses

LONGEST_STATEMENT = 1000
LONGEST_PROSE = 6000
"""Characters at the end of a response without a statement that are read."""
SHORT = 100
"""Longest answer, in characters, that an explanation may follow."""

_FACTORIAL = re.compile(r"[\s(]*(-?)([0-9]{1,3}) ?![\s).]*")
_UNKNOWN = re.compile("(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_WITH_FACTORIAL = re.compile(r"[0-9] ?!(?!=)")


def number(text: str, answer: str, finished: bool) -> bool:
    """The number that the text gives equals the answer. At the end of a truncated text, a number may be incomplete and
    does not count.

    >>> number("so it costs $1,234.50.", "1234.5", True), number("3/4", "0.75", True), number("It is 42", "42", False)
    (True, True, False)
    """
    wanted, text = answer_number(answer), spoken(text)
    if wanted is None or not may_come_to(text, wanted):
        return False
    found, whole = _final_number(text, finished, wanted)
    return (finished or whole) and found == wanted


def final_number(text: str) -> tuple[Fraction | None, bool]:
    r"""Return the number that a text gives, and whether the text after it shows that it is complete.

    >>> final_number(r"\boxed{\frac{3}{4}} in 2 steps"), final_number("1+1=2 #### 2 apples, 3 pears")[0]
    ((Fraction(3, 4), True), Fraction(2, 1))
    """
    return _final_number(spoken(text))


def may_come_to(text: str, wanted: Fraction) -> bool:
    """Rule out most wrong answers quickly: a text cannot give a whole number that it does not contain, unless an
    unevaluated term follows its last `=`.

    >>> [may_come_to(text, Fraction(7200)) for text in ("It is 7,200.", "7.2k", "90 * 80", "90 * 80 = 721", "720 more")]
    [True, True, True, False, True]
    """
    if wanted.denominator != 1 or not text.isascii():
        return True
    folded, (written, words) = text.lower(), _written(wanted.numerator)
    if written.search(text) or contains_any(folded, words):
        return True
    return wording.may_hold_term(folded[folded.rfind("=") + 1 :])


END, FEW_NUMBERS = 250, 5
"""Characters at the end of a long response, and numbers in them, that are checked before all of it is read."""
SEPARATOR = r"[,. '_{}\\]{0,3}"
"""What may stand between two digits of one number."""


@lru_cache(maxsize=4096)
def _written(number: int) -> tuple[re.Pattern[str], list[str]]:
    """How a whole number can be written: in digits, with or without separators, or with one of these words. Trailing
    zeros may be a word (`5 million`)."""
    size, digits = abs(number), str(abs(number)).rstrip("0")
    if not size:
        return re.compile(""), []
    first, rest = digits[0], "".join(SEPARATOR + digit for digit in digits[1:])
    words = WORDS[size] if size < 20 else TENS[size // 10 - 2] if size < 100 else "hundred thousand illion"
    return re.compile(rf"{first}(?<![1-9]{first}){rest}(?![,.]?[1-9])"), words.split()


def _final_number(text: str, finished: bool = True, wanted: Fraction | None = None) -> tuple[Fraction | None, bool]:
    """With `wanted`, a text that cannot give that number returns none early."""
    if "<<" in text:
        text = wording.ANNOTATION.sub("", text)
    if "?" in text:
        text = wording.without_refuted_questions(text)
    refuted, announced = set[Fraction | None](), False
    for statement in statements(text):
        empty = hollow(statement.text)
        reading = None if empty else _read(statement)
        if reading is not None:
            return _standing(text, statement, reading)
        announced = announced or (empty and statement.by in ("boxed", "tag"))
        refuted |= denied(statement.text)
    if announced or (not finished and _cut_off_in_a_number(text)):
        return None, False
    if wanted is not None and not may_come_to(_end(text), wanted):
        return None, False
    value, complete = _whole(text, wanted)
    return (None if value in refuted else value), complete


@lru_cache(maxsize=1 << 16)
def answer_number(answer: str) -> Fraction | None:
    """The number of an expected answer. Cached, because the check of the data and every response need it."""
    return final_number(answer)[0]


def _standing(text: str, statement: Final, reading: Reading) -> tuple[Fraction | None, bool]:
    """The value of a statement, unless the following text retracts it, denies it or continues to a conclusion."""
    after = text[statement.end : statement.end + LONGEST_PROSE]
    if not after or after.isspace():
        return reading.value, statement.complete
    if taken_back := retraction(after):
        return _whole(after[taken_back.end() :])
    value = reading.value
    if value is not None and wording.may_deny(after) and any(value in denied(said) for said, _ in sentences(after)):
        return _whole(after)
    concluded = _concluded(after, value)
    return (value, statement.complete) if concluded is None else concluded


def _concluded(after: str, value: Fraction | None) -> tuple[Fraction | None, bool] | None:
    """The result of the last sentence with a number, if it draws a conclusion and does not explain."""
    last = next(numeric_sentences(after), None)
    if last is None or not wording.CONCLUDING.match(last[0]) or wording.EXPLAINING.search(after):
        return None
    said = plain(last[0])
    values = {found.value for found in quantities(said)}
    if not wording.EQUALS.search(said) and (len(values) != 1 or value in values):
        return None
    reading = _sentence_value(last[0])
    return reading and (reading.value, last[1])


def _read(statement: Final) -> Reading | None:
    """The value of a statement; `None` if it says nothing about the answer."""
    content = statement.text
    if simple := SIMPLE.fullmatch(content):
        written = "".join(simple.groups("")).replace(",", "")
        return Reading(Fraction(written if simple[3] else int(written)))
    if taken_back := retraction(content):
        content = content[taken_back.end() :]
    if (but := wording.BUT.search(content)) and wording.has_number(content[but.end() :]):
        content = content[but.end() :]
    if len(content) > LONGEST_STATEMENT:
        return Reading(None) if statement.by == "boxed" else None
    if statement.by == "tag" and "\n" in content.strip():
        return _read_lines(content.strip().split("\n"))
    if statement.by == "boxed" and (special := _special(_spelt(content))):
        return special
    reading = _statement_value(content)
    if reading is None and (statement.by in ("boxed", "tag") or wording.NO_ANSWER.match(content)):
        return Reading(None)
    return reading


def _read_lines(lines: list[str]) -> Reading | None:
    """For a tag with several lines: its last line with a number, or its first line if the others explain it."""
    first = _statement_value(lines[0])
    others = [line for line in lines[1:] if wording.has_number(line)]
    if first is not None and (
        not others or (not wording.EQUALS.search(lines[0]) and not re.search("[A-Za-z]{2,} .*[A-Za-z]{2,}", lines[0]))
    ):
        alone = [line for line in others if not re.search("[A-Za-z=]", line)]
        return Reading(None) if alone else first
    value, _ = _whole("\n".join(lines))
    return Reading(value)


def _special(expression: str) -> Reading | None:
    """In a box `!` is a factorial, elsewhere it ends a sentence. A number in a term with a factorial is not the result,
    and a number next to a variable, as in 24x, is not a number."""
    result = re.split("[=≈]", expression.replace("!=", "! =") if re.search("[0-9]!=", expression) else expression)[-1]
    if alone := _FACTORIAL.fullmatch(result):
        value = factorial(int(alone[2]))
        return Reading(Fraction(-value if alone[1] else value) if value < 10**LONGEST_NUMBER else None)
    if "!=" in expression:
        return (
            None
            if "=" not in expression.replace("!=", "") and not re.search("[0-9]!=", expression)
            else _statement_value(result)
        )
    return Reading(None) if _WITH_FACTORIAL.search(result) or re.search("[0-9)][xyzn](?![A-Za-z])", result) else None


def _statement_value(content: str) -> Reading | None:
    """The value that a statement gives; `None` if it has no number, or only numbers that it denies."""
    said = _without_asides(wording.without_steps(_spelt(content)))
    if wording.COMPARED.search(said) or wording.BOUND.match(said):
        return Reading(None)
    found = live(said)
    if not found:
        return None
    if len(found) == 1:
        return Reading(found[0].value)
    if wording.EQUALS.search(said):
        return _equation(said, found)
    if _leads(said, found[0]):
        groups = wording.GROUPS.fullmatch(said[found[0].end : found[1].start])  # 3 packs of 24
        return Reading(None if groups or several(said, found) else found[0].value)
    return _sentence_value(content)


def _spelt(text: str) -> str:
    """Rewrite every number in one spelling. A leading minus belongs to the number, even if a space follows it."""
    if not wording.DIGIT.search(text):
        text = with_digits(text)
    return plain(wording.HTML.sub(" ", wording.LEADING_MINUS.sub("-", text)))


def _without_asides(said: str) -> str:
    if "(" not in said and "[" not in said:
        return said
    shorter = wording.ASIDE.sub(" ", said)
    return shorter if re.search("[0-9]", shorter) else said


def _leads(said: str, found: Quantity) -> bool:
    """Whether a statement begins with the number, after a few words and signs at most."""
    before = said[: found.start].strip(" \t\n*_`\"'($\\{[<:~≈#“-")
    return (
        not before
        or re.fullmatch(
            r"(?i)(?:(?:about|approximately|approx\.?|around|roughly|exactly|only|just|simply|therefore|thus|then"
            r"|a total of|usd|rs\.?|[a-j]\)|total:?|option [a-j]:?)[ ,:]*)+",
            before,
        )
        is not None
    )


def _equation(said: str, found: list[Quantity]) -> Reading | None:
    """The right side of the last equation. If it is a term and the left side is a number, both must agree."""
    sides = list(wording.EQUALS.finditer(said))
    right = [item for item in found if item.start >= sides[-1].end()]
    left = [item for item in found if item.end <= sides[-1].start()]
    if not right:
        return Reading(left[-1].value) if left else None
    named = re.search(r"[,;]\s*(?:and )?[A-Za-z]\w*\s*$", said[: sides[-1].start()])
    if named and len(sides) > 1 and not _has_one_unknown(said):
        return Reading(right[0].value if right[0].value == left[-1].value else None)  # x = 7, y = 2
    tail = _after_result(said, sides[-1].end(), right)
    if tail is not None:
        return tail
    if (
        right[0].is_term
        and left
        and not left[-1].is_term
        and left[-1].value != right[0].value
        and not re.search("[A-Za-z]", said[left[-1].end : sides[-1].start()])
    ):
        return Reading(None)
    return Reading(None if len(right) > 1 and several(said, right) else right[0].value)


def _has_one_unknown(said: str) -> bool:
    """`2x = 16, x = 8`, but not `x = 7, y = 2`."""
    names = _UNKNOWN.findall(said)
    return len(names) > 1 and len(set(names)) == 1


def _after_result(said: str, start: int, found: list[Quantity]) -> Reading | None:
    """The number after the last word such as *so* or *which is*."""
    for result in reversed(list(wording.RESULT.finditer(said, start))):
        after = [item for item in found if item.start >= result.end()]
        if after:
            return clause_value(said[result.end() :])
    return None


# Responses without a statement.


def _end(text: str) -> str:
    """Return only the end of a long text if it contains enough numbers to include the sentence that decides."""
    end = text[-END:]
    return end if len(text) > 2 * END and len(wording.NUMBER_END.findall(end)) >= FEW_NUMBERS else text


def _cut_off_in_a_number(text: str) -> bool:
    """Whether a text was cut off in a sentence with a number. More digits or another number may have followed."""
    line = text.rfind("\n") + 1
    start = max(text.rfind(". ", line), text.rfind("! ", line), text.rfind("? ", line))
    return wording.DIGIT.search(text, max(line, start + 1)) is not None


def _whole(text: str, wanted: Fraction | None = None) -> tuple[Fraction | None, bool]:
    """The value of a text without a statement. With `wanted`, any other value may be returned as `None`."""
    text = text[-LONGEST_PROSE:]
    explained = wording.EXPLAINED.search(text, 0, SHORT + 20)
    if explained is not None and wording.DIGIT.search(text, 0, explained.start()):
        return _whole(text[: explained.start() + 1], wanted)
    if (first := _first_of_all(text)) is not None:
        return first
    if (option := chosen_option(text)) is not None:
        return (_statement_value(option) or Reading(None)).value, True
    if not wording.has_number(text) or breaks_off(text):
        return None, False
    return _last_value(text, wanted)


def _last_value(text: str, wanted: Fraction | None) -> tuple[Fraction | None, bool]:
    """The value of the last sentence with a number, unless the text denies it or refuses to answer."""
    refuted = set[Fraction | None]()
    for said, complete in numeric_sentences(text):
        reading = _sentence_value(said, wanted)
        if reading is not None and reading.value is None:
            return None, False
        refuted |= denied(said)
        if reading is not None:
            return (None, False) if reading.value in refuted or refuses(text) else (reading.value, complete)
    return None, False


def _first_of_all(text: str) -> tuple[Fraction | None, bool] | None:
    """The number with unit at the start of a response, if only sentences without a result follow."""
    if len(text) > 2 * SHORT:
        return None
    said, complete = sentence(text, len(text) - len(text.lstrip()))
    rest = text[len(said) :].strip(" .\n")
    if not complete or len(rest) > SHORT or not re.search("[A-Za-z]{2,} .*[0-9]", rest) or not is_bare(said, rest):
        return None
    if wording.EQUALS.search(text) or wording.RESULT.search(rest) or wording.CONCLUDING.search(rest):
        return None
    if len(options(text)) > 1:
        return None
    reading = _statement_value(said)
    return reading and (None if reading.value in denied(rest) else reading.value, complete)


def _only_tells(said: str) -> bool:
    """Whether a sentence says what to compute, not what the result is: *multiply 12 by 4*."""
    told = wording.OPERATION.match(said)
    if told is None or wording.COMPUTED.search(said, told.end()):
        return False
    return not (told[0].endswith("ing") and re.search(r",\s[^0-9]*[0-9]", said[told.end() :]))


def _may_be(said: str, found: list[Quantity], wanted: Fraction) -> bool:
    """Whether one of the quantities of a sentence, or a part of a term, may be the wanted number."""
    if any(item.is_term for item in found) and may_come_to(said, wanted):
        return True
    return any(item.value is None or item.value == wanted for item in found)


def _sentence_value(sentence: str, wanted: Fraction | None = None) -> Reading | None:
    """The value of a sentence; `None` if it has no number. With `wanted`, any other value may be returned as `None`."""
    bold = wording.BOLD.findall(sentence) if "**" in sentence else []
    if bold and not wording.EQUALS.search(wording.BOLD.sub("", sentence)) and not bold[-1].rstrip().endswith(":"):
        return _statement_value(bold[-1])
    said = _without_asides(_spelt(sentence))
    if reason := wording.reason(said):
        main = live(said[: reason.start()])
        said = said[: reason.start()] if main else said
    said = without_relative_clauses(said)
    found = live(said)
    if not found or (wanted is not None and not _may_be(said, found, wanted)):
        return Reading(None) if found else None
    if wording.EQUALS.search(said):
        return _equation(said, found)
    if _leads(said, found[0]) and not VERBS.search(said):
        return Reading(None if len(found) > 1 and several(said, found) else found[0].value)
    if len(found) > 1 and (_only_tells(said) or (" and " in said and wording.PARALLEL.search(said))):
        return Reading(None)
    return _after_result(said, 0, found) or clause_value(said)
