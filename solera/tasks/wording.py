"""Words and signs that show the role of a number in a sentence: result, denied, one of several, or a remark."""

import re

from solera.tasks.searching import ascii_words, contains_any
from solera.tasks.spelling import TENS, WORDS

_FIGURE = re.compile("[0-9¼½¾⅐-⅞０-９⁰¹²³]")
_WORD = re.compile(r"\w+")
_NUMBER_WORDS = {
    word.encode(): re.compile(rf"{word}(?<!\w{word})(?!\w)")
    for word in (*WORDS, *TENS, "half", "hundred", "thousand", "million")
}
_TEEN = re.compile(r"teen(?<=\wteen)(?!\w)")
"""A word with this end."""


def has_number(text: str) -> bool:
    """Whether a text has a number, in digits or in words."""
    if _FIGURE.search(text):
        return True
    words = ascii_words(text)  # contains every number word; but a letter outside ASCII may stand beside it
    found = _NUMBER_WORDS.keys() & words.split()
    if not found and b"teen " not in words:
        return False
    folded = text.lower()
    return any(_NUMBER_WORDS[word].search(folded) for word in found) or _TEEN.search(folded) is not None


EQUALS = re.compile(r"=(?<![!<>=≠/]=)(?![=/])>?|≈|≃|⇒|→|\\approx|equals\b(?<!\wequals)|is equal to\b(?<!\wis equal to)")
"""Each alternative begins with a character: Python finds these much faster than a lookbehind or a word boundary."""
COMPARED = re.compile(
    r"[≥≤] ?[-$]?[0-9]|(?:\b[A-Za-z]|[0-9)]) ?[<>]=? ?[-$]?[0-9]|\b(?:more|less|fewer|greater|larger"
    r"|smaller) than [$]?[0-9]"
)
BOUND = re.compile(r"[\s*$]*(?:[<>]=?|over|under|above|below|almost|nearly) ?[-$]?[0-9](?![0-9.,]*>)")
PARALLEL = re.compile(
    r"\b(has|have|had|gets?|got|pays?|paid|earns?|earned|is|was|needs?|makes?|made) [$]?[0-9][0-9.,]*+[^,;0-9]{0,30},?"
    r" and [A-Z][a-z]+ \1 [$]?[0-9][0-9.,]*+[^0-9]*$"
)
"""Two parallel statements: *Lee has 14 coins and Sam has 20 coins*."""
ASIDE = re.compile(
    r"(?<=[\w%$*.}])( ?)\((?![^()]*\b(?:or|maybe|perhaps|possibly)\b)[^()]{0,200}[A-Za-z=≈][^()]{0,200}\)"
    r"|\[[^\[\]]{0,200}[A-Za-z=][^\[\]]{0,200}\]"
)
DENYING = (
    "not", "nor", "n't", "n’t", "never", "no longer", "neither", "≠", "!=", "=/=", "<>", "\\ne", "wrong", "incorrect",
    "instead", "rather", "false", "other than", "except", "unlike", "but", "mistake", "impossible", "too ",
)  # fmt: skip
"""A sentence without any of these words denies no number."""


def may_deny(sentence: str) -> bool:
    return contains_any(sentence.lower(), DENYING)


NEGATED_BEFORE = re.compile(
    r"(?i)(?:\b(?:not|never|no longer|neither|nor|rather than|instead of|other than|except|unlike|anything but"
    r"|cannot|false that|(?:mistake|wrong|incorrect) to (?:say|answer|think|assume|conclude|claim))"
    r"|n['’]t|≠|!=|=/=|<>)[ *_]*(?:(?:be|is|are|equal|equals|to|the|a|that|number|value|total|answer|exactly"
    r"|actually|simply|just|have|has|sell|sold|about|of|it|she|he|they|get|make) ){0,4}"
    r"[\s*_$€£\"'`(\\]*$"
)
NEGATED_AFTER = re.compile(
    r"(?i)[\s*_\"'`)$%]*(?:[a-z]+ ){0,2}(?:(?:is|was|are|would be|seems|looks)(?: clearly| obviously| definitely"
    r"| also)? (?:wrong|incorrect|false|a mistake|impossible|too (?:high|low|big|small|large|many|few|much)"
    r"|not (?:right|correct|the|it|possible|what|our|my))|(?:isn['’]t|wasn['’]t|cannot be|can['’]t be) (?:right"
    r"|correct|the|it|possible|what)|\(?(?:wrong|incorrect)\b)"
)
RESULT = re.compile(
    r"(?i)(?:\b(?=[abfghilmrstwy])(?:so|thus|therefore|hence|then|which (?:is|are|was|were|equals?|makes?|gives?"
    r"|means?|leaves?|comes? to|totals?|brings?|rounds? (?:up |down |off )?to)|giving|making|leaving"
    r"|meaning|bringing|totall?ing"
    r"|(?:for )?(?:a|the) (?:grand |final |combined )?total(?: (?:cost|amount|number|price|sum))?(?: (?:of|is|was"
    r"|to))?|it['’]s|it is|but|we get|i get|to get|yields?|results? in)\b)"
)
OPERATION = re.compile(
    r"(?i)\W*(?:(?:so|then|now|next|first|finally|and|we|you|i|let us|let['’]s|must|need to|have to|can|should|just"
    r"|simply|to find [^,0-9]{1,60}),? )*(?:multiply|add|subtract|divide)(?:ing)?\b"
)
"""A sentence that says what to compute."""
COMPUTED = re.compile(
    r"(?i)\b(?:is|are|was|were|gets?|got|gives?|gave|giving|makes?|made|making|leaves?|left|leaving|has|have|had|comes?"
    r"|becomes?|results?|totals?|yields?|obtain|find|reach)\b[^0-9]{0,40}[0-9]"
)
OR = re.compile(
    r"(?i)[\s*_$]*(?:[a-z]+[\s,]+){0,4},?\s*\(?(?:or|maybe|perhaps|possibly|alternatively|and/or)\b(?: (?:maybe"
    r"|perhaps"
    r"|possibly|even|rather|about))*[\s*_$]*"
)
LIST = re.compile(r"(?i)[\s*_$\")\]]*(?:[,;/&|]|\band\b|\bto\b|,? and|\bthrough\b|\.\.\.?|…)[\s*_$\"(\[]*|[\s\\]+(?=$)")
MEASURE = (
    r"(?:hours?|hrs?|h|minutes?|mins?|min|seconds?|secs?|days?|weeks?|months?|years?|feet|foot|ft|inch(?:es)?|yards?"
    r"|pounds?|lbs?|ounces?|oz|dollars?|cents?|kg|km|meters?|liters?|cups?|quarts?|pints?)"
)
COMPOUND = re.compile(rf"(?i)\s?{MEASURE}\.?,?(?:\s(?:and\s)?|\s?&\s?)")
AND = re.compile(r"(?i)\s(?:[a-z]+\s){1,3}(?:and|&)\s[$]?")
GROUPS = re.compile(r"(?i)\s(?!out )[a-z]+ of [$]?")
UNIT = re.compile(r"[ *_]*([A-Za-z]+)")
UNIT_AFTER = re.compile(r"[ *_]*(?:an? |per )?(?!or\b)([A-Za-z]+)")
BETWEEN = re.compile(r"(?i)\bbetween [$]?$")
_ADDING = {
    "in", "for", "over", "during", "within", "at", "with", "from", "on", "until", "after", "before", "per", "every",
    "each", "by", "of", "the", "these", "those", "first", "last", "next", "another", "all", "between", "among", "age",
    "day", "week", "year", "month", "hour", "other", "remaining",
}  # fmt: skip
"""Words before a number that is only an addition: *in 2 months*."""
COMPARISON = re.compile(r"(?i)\b(?:than|versus|vs\.?|compared (?:to|with)|against|instead of|unlike|while)[ *_$(\"]*$")
_KEPT = (
    "total", "sum", "cost", "price", "number", "amount", "value", "profit", "age", "average", "loss", "area", "volume",
    "speed", "rate", "change", "distance", "sale", "difference", "product", "out", "answer", "weight", "length",
    "maximum", "minimum", "is", "are", "was", "were", "salary", "income", "bill", "fee", "tip", "debt", "fine",
    "payment", "budget", "score", "balance",
)  # fmt: skip
_KEPT_OF = tuple(word + of for word in _KEPT for of in (" of", "s of"))
_LEFT_WITH = re.compile(r"\b(?:left|leaving \w+|ends? up|remains?|ended up) with$")


def is_added(before: str) -> bool:
    """Whether these words introduce an addition: *in* and *boxes of* do, *a total of* does not.

    >>> [is_added(before) for before in ("sold in ", "boxes of $", "a total of $", "is left with ", "it is ")]
    [True, True, False, False, False]
    """
    before = before.lower()
    last = _WORD.match(before.rstrip(' *_$("')[::-1])
    if last is None or last[0][::-1] not in _ADDING:
        return False
    before = before.rstrip(" *_$")
    return not before.endswith(_KEPT_OF) and not (before.endswith(" with") and _LEFT_WITH.search(before))


PART_OF = re.compile(r"(?i)[ *_]*(?:[a-z]+ )?of (?:them|which|these|those|whom)\b")
SIDE = re.compile(r"(?i)[,;\s—–-]*(?:with|in|on|at|over|and the (?:other|remaining))\b")
RELATIVE_WORDS = ("which", " who", "that ", "each ", "while", "whereas")
RELATIVE = re.compile(
    r"(?:,\s(?:(?:all|each|both|some|most|many|none|half) of (?:which|whom|them)|which|who|whom|whose|whereas|while"
    r"|each (?:with|holding|containing))|(?<=[a-z]) (?:that|which|who) (?:holds?|contains?|have|has|weighs?|costs?"
    r"|fits?|lasts?|are (?:in|on)|she|he|they|it|we))\b(?:[^,;:]|,(?=[0-9]))*"
)
RESULTING = re.compile(
    r"(?i)which (?:\w+ )?(?:(?:is|are|was|were)(?! \w+(?:ed|en|wn|ut|it|ld|pt) [a-z])|will|would|equals?"
    r"|makes?|made|gives?|gave|means?|meant|leaves?|left"
    r"|totals?|brings?|rounds?|comes?|came|adds?|amounts?|works?|takes?|took|costs?(?!.*\b(?:each|apiece|per)\b))\b"
    r"|who(?: \w+)? (?:has|have|had|gets?|got|is|are|was|were)\b|=|≈"
    r"|\b(?:gives?|gave|makes?|made|leaves?|left|equals?|is|are|was|were|totals?|earns?|brings?) (?:\w+ )?[$€£]?[0-9]"
)
COMPARING = re.compile(
    r",?\s(?:which|that) (?:is|are|was|were) [$]?[0-9][0-9.,]*%?(?: [a-z]+)? (?:more|less|fewer|times|higher|lower"
    r"|greater|older|younger|longer|shorter)\b(?:[^,;:]|,(?=[0-9]))*"
)
LATER = re.compile(r"(?i)\s(?:after|when|while|once|because|since|if|where|given that|(?:by|from|through) [a-z]+ing)\b")
CLAUSE = re.compile(r"[,;](?=\s)|:\s|\s[-–—]\s|—")
_STEP = re.compile(
    r"(?i)\b(?=[cefmpqs])(?:steps?|parts?|problem|question|section|example|method|case|equation|phase|stage|figure|exercise"
    r"|part)\s*#?[0-9]{1,2}\b(?:\s*(?:and|&|,|-)\s*#?[0-9]{1,2}\b(?!\s*=))*"
    r"(?!\s*[+*/=×])[.:)]?"
)
_NUMBERED = (
    "step", "part", "problem", "question", "section", "example", "method", "case", "equation", "phase", "stage",
    "figure", "exercise",
)  # fmt: skip


def without_steps(text: str) -> str:
    """Remove numbers of steps and the like: *Step 2*. The words are searched first, because the pattern is slow."""
    return _STEP.sub(" ", text) if contains_any(text.lower(), _NUMBERED) else text


ITEM = re.compile(r"\s*(?:[-•>]\s+|\*\s+|#{1,6}\s*)*(?:\*\*)?(?:\(?[0-9]{1,2}[.)](?:\*\*)?\s+(?=\S)|\(?[a-hA-H]\)\s+)?")
BOLD = re.compile(r"(?<![*0-9])\*\*(?!\s)([^*\n]{1,120}?[0-9][^*\n]{0,120}?)\*\*(?![*0-9])")
NUMBER_END = re.compile("[0-9](?![0-9])")
DIGIT = re.compile("[0-9¼½¾⅐-⅞０-９]")
HTML = re.compile("</?[A-Za-z]{1,10}/?>")
LEADING_MINUS = re.compile(r"^[\s$*]*[-−–] (?=[$€£¥₹]?\.?[0-9]|\\[dtc]?frac)")
_REASON = re.compile(r"(?i),?\s\(?(?:because|since)\b")
_REASONING = ("becau", "nce")
"""The letters of *because* and *since* that have only one upper-case form."""


def reason(text: str) -> re.Match[str] | None:
    """Find the first *because* or *since*. Parts of these words are searched first, because the pattern is slow."""
    return _REASON.search(text) if contains_any(text.lower(), _REASONING) else None


ANNOTATION = re.compile("<<[^<>\n]*>>")
_CHECK = re.compile(
    r"(?im)(?:^|(?<=[.!?] )|(?<=\())[ \t*_>#-]*(?:(?:quick |sanity |double[- ])?checks?\b ?[:(]?|(?:to |let me "
    r"|let['’]s |we can |i(?:['’]ll| will)? )(?:also )?(?:double[- ]?)?(?:check|verify|confirm)\b"
    r"|verif(?:ication|ying)\b|proof\b|note\b ?(?:that|:)|p\.?s\.?:?\s|as a (?:check|sanity))[^\n]*"
)
_CHECKING = ("check", "verif", "confirm", "proof", "note", "ps", "p.s", "sanity")


def without_checks(text: str) -> str:
    """Remove checks and notes: *Check: 72 - 24 = 48*. The words are searched first, because the pattern is slow."""
    return _CHECK.sub("", text) if contains_any(text.lower(), _CHECKING) else text


_OPERATORS = "+*/^\\%"
_MINUS_OR_FACTORIAL = re.compile(r"[0-9)]\s*[-!]")
_OPERATING = (
    "plus", "minus", "times", "multipl", "divide", "added", "subtract", "squared", "cubed", "half", "twice", "double",
)  # fmt: skip


def may_hold_term(text: str) -> bool:
    """Whether a lower-case text may contain an unevaluated term."""
    if contains_any(text, _OPERATORS) or contains_any(text, _OPERATING):
        return True
    return contains_any(text, "-!") and _MINUS_OR_FACTORIAL.search(text) is not None


_ANSWERED_NO = re.compile(r"(?i)\?\s*(?:no|nope|wrong)\b(?!,? (?:doubt|problem))")
BUT = re.compile(
    r"(?i),? but (?:it['’]?s|it is|actually|really|in fact|(?:the|its) (?:real|correct|true|actual"
    r"|right)\b[a-z ]*?(?: is)?)\b"
)
BRACKETED = re.compile(r"\s*\([^()]*\)[\s.]*")
EXPLAINED = re.compile(
    r"(?i)\n[ \t*_#>]*(?:explanation|reasoning|working|workings|justification|breakdown|steps|why|how|details"
    r"|solution)[*_ \t]*(?::|\n)|\n[ \t*_#>]*(?:let me explain|here(?:['’]?s| is) (?:how|why|the))\b"
)
"""Words after a short answer that introduce an explanation."""
_CHATTER = re.compile(
    r"(?i)\b(?:let me know|hope (?:this|that|it) helps|feel free|(?:other|more|further) questions|i(?:['’]m"
    r"| am) (?!not ).{0,30}(?:sure|certain|confident)|confidence|checked (?:it|this|my)"
    r"|problem (?:was|is) (?:solved|from)|(?:total|number of) steps)\b"
)
_CHATTING = (
    "let me know",
    "hope",
    "feel free",
    "question",
    "sure",
    "certain",
    "confiden",
    "checked",
    "problem",
    "steps",
)


def is_chatter(sentence: str) -> bool:
    """Whether a sentence is about the answer or the reader. The words are searched first, because the pattern is
    slow."""
    return contains_any(sentence.lower(), _CHATTING) and _CHATTER.search(sentence) is not None


CONCLUDING = re.compile(
    r"(?i)[\s*_>#\-•]*(?:so|and|then|but|now)?,?\s*(?:(?:therefore|thus|hence|finally|in total|in all|altogether"
    r"|all together|overall|combined|in sum|in conclusion)\b"
    r"|(?:(?:the|her|his|their|its|our|grand|final|overall) ){0,2}(?:total|sum|result)\b)"
)
EXPLAINING = re.compile(
    r"(?i)\b(?:explanations?|explained|explain|reasoning|working|workings|check|checking|verif\w+|proof|note"
    r"|justification|breakdown|here['’]s|here is|step[- ]by[- ]step|solution|steps|details?|because|since|how)\b"
)
NO_ANSWER = re.compile(
    r"(?i)\W*(?:none|unknown|undetermined|undefined|n/a|nothing|impossible|infinit\w+|no (?:\w+ )?(?:solution"
    r"|answer)|not (?:enough|possible|known|determined|given)|(?:it )?(?:cannot|can['’]?t) be\b"
    r"|i (?:do not|don['’]?t) know|insufficient)\b"
)


def without_refuted_questions(text: str) -> str:
    """Remove questions that the text itself answers with no.

    >>> without_refuted_questions("It has 3 parts. Is it 24? No, it is 72.")
    'It has 3 parts., it is 72.'
    """
    kept, start = [], 0
    for refuted in _ANSWERED_NO.finditer(text):
        begin = max(text.rfind(mark, start, refuted.start()) for mark in ".!?\n") + 1
        kept.append(text[start : max(start, begin)])
        start = refuted.end()
    return "".join([*kept, text[start:]])
