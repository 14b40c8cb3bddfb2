"""Normalise the different ways to write a number."""

import re
import unicodedata

from solera.tasks.searching import contains_any

_VULGAR, _RAISED, _WIDE = "¼½¾⅐-⅞", "⁰¹²³⁴⁵⁶⁷⁸⁹", "".join(map(chr, range(0xFF10, 0xFF1A)))
_OTHER_DIGIT = re.compile(f"[{_WIDE}{_VULGAR}{_RAISED}]")
_AMOUNT = r"(?=[$€£¥₹]?\.?[0-9]|\\[dtc]?frac)"
_NEGATED, _CLOSED = r"-(?<![\w)\]}.]-)(?<![\w)\]}.] -)(?:\\left ?)?\( ?", r" ?(?:\\right ?)?\)"  # but 8-(5)
_QUANTITY = r"[0-9][0-9.,]{0,40}(?:/[0-9]{1,20})?|\\[dtc]?frac ?\{[0-9.]{1,20}\} ?\{[0-9.]{1,20}\}"
_SPELLINGS = tuple(
    (needs, re.compile(spelling), plain)
    for needs, spelling, plain in (
        ("\\", r"\\(?=[$%])", ""),
        (
            "",
            r"([0-9])(?:,?\\!| ?\\[,;: ] ?|\{,\}|[~'’_\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))",
            lambda before: f"{before[1]},",
        ),  # 1\,000, 1{,}000
        ("frac", r"([0-9]) ?\\[,;: ] ?(?=\\[dtc]?frac)", r"\1 "),
        ("_", r"(?<![A-Za-z0-9_])_{1,3}(?=\$?[0-9])", ""),  # __42__
        ("_{", r"_\{([0-9]{1,9})\}", r"_\1"),
        ("**", r"(?<=[0-9])\*\*(?=-?[0-9])", "^"),
        ("^{", r"\^\{(-?[0-9]{1,9})\}", r"^\1"),
        ("10^", r"(?<=[0-9]) ?(?:\\times|\\cdot|[×·*x]) ?10\^(-?[0-9]{1,9})", r"e\1"),
        ("^", r"(?<![0-9])\^(?:\{[^{}]{0,20}\}|-?[0-9]++)", ""),  # cm^2
        ("\\", r"\\[dtc]?frac ?([0-9])([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        ("", r"\\sqrt ?(?:\[[^\]]{0,20}\])?(?:\{[^{}]{0,100}\}|[0-9])|√[0-9.]++", "√"),
        ("\\", r"\\(?:text|mathrm|mbox) ?\{([^{}]{0,100})\}", r" \1 "),
        ("\\", r"\\pi(?![A-Za-z])", "π"),
        ("\\", r"\\approx(?![A-Za-z])", "≈"),
        ("\\", r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        ("\\", r"\\div(?![A-Za-z])", "÷"),
        ("\\n", r"\\(?:neq?(?![A-Za-z])|not ?=)", "≠"),
        ("\\", r"\\(?:[lg]eq?(?:slant)?|[lg]t)(?![A-Za-z])", "≥"),
        ("\\pm", r"\\pm(?![A-Za-z])", "±"),
        ("\\", r"\\(?:log|ln|exp|sin|cos|tan|binom|sum|prod|int|max|min|gcd|lcm)(?![A-Za-z])", "√"),
        ("negative", r"(?i)\bnegative {1,3}" + _AMOUNT, "-"),
        ("minus", r"(?i)(?:^\s*|(?<=[=:] )|(?<=\bis ))minus {1,3}" + _AMOUNT, "-"),  # but 20 minus 5
        ("- ", "= ?- " + _AMOUNT, "=-"),
        ("(", rf"{_NEGATED}- ?({_QUANTITY}){_CLOSED}", r"\1"),  # -(-5)
        ("(", rf"{_NEGATED}({_QUANTITY}){_CLOSED}", r"-\1"),
        ("", r"\b(?:Rs\.?|USD|EUR|GBP|CAD|AUD|NZD|INR|JPY|CNY|CHF|MXN|SGD|HKD|PHP|ZAR|KES|NGN) ?(?=[0-9])", ""),
        ("half", r"(?i)\b(?:one[- ])?half(?: of)? (?=\$?[0-9])", "1/2 * "),
        ("twice", r"(?i)\btwice (?=\$?[0-9])", "2 * "),
    )
)
"""Spellings that are normalised before a number is read, and what a text must contain for each, in any case.

Patterns that are searched for in every text begin with a character: Python finds these many times faster than it tries
a lookbehind at every position.
"""
_SIGNS = str.maketrans("−–‐‑－．，⁄" + _WIDE, "-----.,/" + "0123456789")
_OTHER_SIGN = re.compile(f"[{''.join(map(chr, _SIGNS))}]")
_SUPERSCRIPTS = re.compile(f"[{_RAISED}⁻]+")
_VULGAR_FRACTION = re.compile(f"([0-9] ?)?([{_VULGAR}])")
_OTHER_CHARACTER = re.compile(f"[{_VULGAR}{_RAISED}⁻{''.join(map(chr, _SIGNS))}]")
REPEATING_DECIMAL = re.compile(r"(?<![0-9,])([0-9,]{0,20})\.([0-9]{0,20})\\overline ?\{([0-9]{1,20})\}")
_LATEX_FRACTION = re.compile(r"(-?)\\[dtc]?frac ?\{([^{}]{1,100})\} ?\{([^{}]{1,100})\}")
_LEFT_FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])")
_TERM = re.compile(r"[-+]?[ $€£¥₹]{0,2}[0-9.][0-9.,]*(?:\^-?[0-9]+)?")
_ARITHMETIC = re.compile(r"[-+*/0-9., ()]+")
_COMMAND = re.compile(r"\\[A-Za-z]++")
_MIXED_NUMBER = re.compile(
    r"([0-9](?<![0-9.,/][0-9])[0-9]{0,19})(?: ?\\[dtc]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}"
    r"| (?:and )?([0-9]{1,20})/([0-9]{1,20})(?![0-9/]))"
)


_RARE = re.compile(r"[^ \nA-Za-z0-9,.;:!?$%=+*()&#@\"'/-]")
_RARE_PIECES, _RARE_WORDS = ("**", "- ", "-("), ("negative", "minus", "half", "twice")
_CURRENCY, _DIVIDED = re.compile("[A-Z][A-Zs]"), re.compile("[0-9]['/][0-9]")
"""Two letters of a currency's name; two numbers in a fraction, or the parts of one number."""


def _is_plain(text: str) -> bool:
    """Whether a text has none of the characters, pieces and words that a spelling above or a further step of `plain`
    needs. `plain` changes nothing in it. Most sentences are like this."""
    if _RARE.search(text) or _CURRENCY.search(text) or contains_any(text, _RARE_PIECES):
        return False
    return not contains_any(text.casefold(), _RARE_WORDS) and not _DIVIDED.search(text)


def plain(text: str) -> str:
    if _is_plain(text):
        return text
    if not text.isascii() and _OTHER_CHARACTER.search(text):
        text = _SUPERSCRIPTS.sub(lambda raised: "^" + unicodedata.normalize("NFKC", raised[0]).replace("−", "-"), text)
        text = _VULGAR_FRACTION.sub(_separate, text)
        text = _OTHER_SIGN.sub(lambda sign: sign[0].translate(_SIGNS), text)
    folded = text.casefold()
    for needs, spelling, plain in _SPELLINGS:
        if needs in text or (needs.isalpha() and needs in folded):
            text = spelling.sub(plain, text)
    if "\\overline" in text:
        text = REPEATING_DECIMAL.sub(repeating, text)
    if "/" in text or "frac" in text:
        text = _MIXED_NUMBER.sub(_improper, text)
    if "frac" in text:
        text = _LEFT_FRACTION.sub("√", _LATEX_FRACTION.sub(_fraction, text))
    return _COMMAND.sub(" ", text)


def _separate(fraction: re.Match[str]) -> str:
    """`½` is 1/2, `1½` is 1 1/2."""
    before = f"{fraction[1][0]} " if fraction[1] else ""
    return before + unicodedata.normalize("NFKC", fraction[2])


def _fraction(fraction: re.Match[str]) -> str:
    r"""`\frac{-3}{4}` is -3/4 and `\frac{miles}{hour}` is a unit. Any other fraction is not a number, and neither are
    its parts."""
    minus, above, below = (part.strip() for part in fraction.groups())
    if not re.search("[0-9π√]", above + below):
        return f"{minus} "
    if not (_TERM.fullmatch(above) and _TERM.fullmatch(below)):
        return f"{minus}(({above})/({below}))" if _ARITHMETIC.fullmatch(above + below) else f"{minus}√"
    negative = sum(part.startswith("-") for part in (minus, above, below)) % 2
    sign = "-" if negative else "+" if minus else ""
    if "^" in below:
        power = re.fullmatch(r"([0-9]{1,9})\^([0-9]{1,2})", below.lstrip("+- "))
        if power is None:
            return f"{minus}√"
        below = str(int(power[1]) ** int(power[2]))
    return f"{sign}{above.lstrip('+- ')}/{below.lstrip('+- $€£¥₹')}"


def repeating(decimal: re.Match[str]) -> str:
    r"""`0.1\overline{6}` is `\frac{15}{90}`."""
    before, start, period = decimal[1].replace(",", ""), decimal[2], decimal[3]
    divisor = 10 ** len(start) * (10 ** len(period) - 1)
    return rf"\frac{{{int(before + start + period) - int(before + start or 0)}}}{{{divisor}}}"


def _improper(mixed: re.Match[str]) -> str:
    r"""`1\frac{1}{2}` and `1 1/2` are 3/2; `3 4/2` are two numbers."""
    whole, part, divisor = (int(number) for number in mixed.groups() if number is not None)
    return f"{whole * divisor + part}/{divisor}" if part < divisor else mixed[0]


WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: value for value, word in enumerate(WORDS)} | {word: 10 * n for n, word in enumerate(TENS, 2)}
MAGNITUDES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "lakh": 10**5,
    "crore": 10**7, "k": 10**3, "mn": 10**6, "bn": 10**9,
}  # fmt: skip
_PARTS = {"hal": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
"""Fractions such as *third*, by the start of the word."""
_COUNT = "|".join(_SMALL)
# `(?=[…])` has the first letters of all alternatives, so that they are not all tried at every word.
_WORDS = re.compile(
    rf"(?i)\b(?=[aefnostz])(?:(?:an?|{_COUNT})(?=[- ](?:hundred|thousand|million|billion|half|third|quarter))|{_COUNT})"
    rf"(?:[- ](?:and )?(?:{_COUNT}|hundred|thousand|million|billion)\b)*+"
    r"(?:(?P<half> and (?:a|one)[- ]half)|[- ](?P<part>half|halves|thirds?|quarters?|fourths?|fifths?|sixths?"
    r"|eighths?|tenths?)|(?! (?:of (?:them|us|the|these|those|which)|more time|another)\b))\b"
)
_POINTED = re.compile(
    r"(?i)\b(?:the|these|those|all|other|last|first|each|every|no|any|some|next|this|that|which|either) $"
)
"""Words after which a number word is not an answer: *the two girls*, *no one*."""


def with_digits(text: str) -> str:
    """Replace numbers written as words by digits.

    >>> with_digits("two hundred and five, seventy-two, three quarters, one and a half of the two")
    '205, 72, 3/4, 3/2 of the two'
    """
    return _WORDS.sub(_digits, text)


def _digits(words: re.Match[str]) -> str:
    if _POINTED.search(words.string, max(0, words.start() - 12), words.start()):
        return words[0]
    end = words.start("half") if words["half"] else words.start("part") - 1 if words["part"] else words.end()
    total = current = 0
    for word in re.findall("[a-z]+", words.string[words.start() : end].lower()):
        if word in MAGNITUDES:
            current = max(current, 1) * MAGNITUDES[word]
            if word != "hundred":
                total, current = total + current, 0
        elif word != "and":
            value = 1 if word in ("a", "an") else _SMALL[word]
            if current % 10 or (current % 100 and value > 9) or (0 < current < 20):  # five six: two numbers
                return words[0]
            current += value
    total += current
    if words["half"]:
        return f"{2 * total + 1}/2"
    if words["part"]:
        part = words["part"].lower()
        return f"{total}/{next(size for start, size in _PARTS.items() if part.startswith(start))}"
    return str(total)
