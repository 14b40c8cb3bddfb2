"""The number that a text comes to, in any of the ways that people and models write one."""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from math import factorial

from solera.tasks.final import READ, after_thinking, final_answer, last_match, sentence

LONGEST_NUMBER = 400
"""Characters, and largest exponent; nothing longer is read as a number, so that megabytes of digits cost nothing."""
NEAR = 60
"""Characters before the last digit of a text in which a break is looked for."""

_NUMBER = re.compile(
    r"""(?: (?<![\w)\]}.]) (?P<sign>[-+]) )?+    # 5-3 ends in 3, not in -3
        [$€£¥₹]?+ (?P<inner>(?<=[$€£¥₹])-)?+       # $-5 as well as -$5
        (?<![A-Za-z0-9_^]) (?<![A-Za-zπ√]/)        # not the 2 of CO2, of x_2, of cm^2, of x/2 or of π/2
        (?P<value>
          (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]{1,2}(?:,[0-9]{2}){1,5},[0-9]{3}(?![0-9,]) | [0-9]++ )
          (?:\.[0-9]++)?+ | \.[0-9]++ )
        (?: [eE](?P<exponent>[-+]?[0-9]++)(?![A-Za-z]) )?+
        (?: \^(?P<power>-?[0-9]++) )?+
        (?: [ ]?/[ ]?(?P<divisor>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]++(?:\.[0-9]++)?+) )?+
        (?P<irrational> [ ]?\*?[ ]?[π√] )?+""",
    re.VERBOSE,
)
_RUN = re.compile(r"[-+$€£¥₹.0-9](?:(?<=[0-9])|(?=[-$€£¥₹.]{0,3}[0-9]))[-+$€£¥₹.0-9,eE^ /*π√]*")
"""Where numbers may stand: from a character that one begins with as far as one could go on."""
_BREAK = re.compile(r"(?:\n|[A-Za-z.,;:!?] +(?=[A-Za-z]))(?!\s*(?i:minus))")
"""Where neither a number nor a spelling of one goes on. What stands before `minus` says whether it is a sign."""
_REACHED = re.compile("}|(?i:minus)|^(?:Rs|[A-Z]{3})")
"""Where in a text with commands what stands before a break may reach behind it: 3 and USD 1/2."""
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
        ("\\", r"\\(?:cdot|times)(?![A-Za-z])", "*"),
        ("negative", r"(?i)\bnegative {1,3}" + _AMOUNT, "-"),
        ("minus", r"(?i)(?:^\s*|(?<=[=:] )|(?<=\bis ))minus {1,3}" + _AMOUNT, "-"),  # but 20 minus 5
        ("- ", "= ?- " + _AMOUNT, "=-"),
        ("(", rf"{_NEGATED}- ?({_QUANTITY}){_CLOSED}", r"\1"),  # -(-5)
        ("(", rf"{_NEGATED}({_QUANTITY}){_CLOSED}", r"-\1"),
        ("", r"[A-Z](?<=\b[A-Z])(?:(?<=R)s\.?|[A-Z]{2}) ?(?=[0-9])", ""),
    )
)
"""Ways to write a number that are put into one before it is read, and what a text must hold for each, in any case.

Those that every text is searched for begin with a character: Python goes from one to the next of these many times as
fast as it tries a lookbehind everywhere.
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
_COMMAND = re.compile(r"\\[A-Za-z]++")
_MIXED_NUMBER = re.compile(
    r"([0-9](?<![0-9.,/][0-9])[0-9]{0,19})(?: ?\\[dtc]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}"
    r"| (?:and )?([0-9]{1,20})/([0-9]{1,20})(?![0-9/]))"
)
_ASIDE = re.compile(r"\([^()]{0,200}=[^()]{0,200}\)")
_NO_NUMBER = re.compile("(?:[^A-Za-zπ√]|[A-Za-z](?![A-Za-z]))*+[π√]")  # but: with π as 3 we get 18
_FACTORIAL = re.compile(r"[\s(]*(-?)([0-9]{1,3}) ?![\s).]*")
_WITH_FACTORIAL = re.compile(r"[0-9] ?!(?!=)")
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9.,])")


def number(text: str, answer: str, finished: bool) -> bool:
    """The number that the text comes to is the answer's. One at the very end of a text cut off may not be complete.

    >>> number("so it costs $1,234.50.", "1234.5", True), number("3/4", "0.75", True), number("It is 42", "42", False)
    (True, True, False)
    """
    found, whole = final_number(text)
    return found is not None and (finished or whole) and found == answer_number(answer)


def final_number(text: str) -> tuple[Fraction | None, bool]:
    r"""The number a text comes to, and whether what follows it shows that it is complete.

    That is the last one inside the last `\boxed{…}`; else, in what `final_answer` takes for the statement of the
    answer, the first, or where an equation stands there the first after its last `=`; else the last of all.

    >>> final_number(r"\boxed{\frac{3}{4}} in 2 steps"), final_number("1+1=2 #### 2 apples, 3 pears")[0]
    ((Fraction(3, 4), True), Fraction(2, 1))
    """
    final = final_answer(text)
    if final.by in ("boxed", "tag"):
        joined = _SPACED.sub(lambda spaced: spaced[0].replace(" ", ","), _signed(final.text))
        return (_boxed if final.by == "boxed" else _enclosed)(_plain(joined)), final.complete
    if final.by != "whole":
        match = _stated(_plain(_signed(final.text) if final.by == "mark" else final.text))
        if match or final.by == "mark":
            return (_value(match), final.complete or _is_whole(match)) if match else (None, False)
    return _last_of_all(after_thinking(text[-READ:]))


@lru_cache(maxsize=4096)
def answer_number(answer: str) -> Fraction | None:
    """The number an answer stands for: asked once for every response to a problem."""
    return final_number(answer)[0]


def _boxed(expression: str) -> Fraction | None:
    """In a box `!` is a factorial, elsewhere the end of a sentence; a number in a term with one is not the result."""
    result = re.split("(?<!!)[=≈]", expression)[-1]
    if alone := _FACTORIAL.fullmatch(result):
        return _factorial(*alone.groups())
    return None if _WITH_FACTORIAL.search(result) else _enclosed(expression)


def _factorial(sign: str, number: str) -> Fraction | None:
    value = factorial(int(number))
    return Fraction(-value if sign else value) if value < 10**LONGEST_NUMBER else None


def _enclosed(expression: str) -> Fraction | None:
    r"""The last number, unless what it belongs to is none: `3+\sqrt{2}`, `\frac{x+1}{2}`."""
    return None if _NO_NUMBER.match(re.split("[=≈]", expression)[-1]) else _last(expression)[0]


def _stated(statement: str) -> re.Match[str] | None:
    """The first number, or the first after the last `=`; an equation in brackets behind it is an explanation."""
    for claim in (_ASIDE.sub("", statement), statement):
        match = _NUMBER.search(claim.rpartition("=")[2]) or _NUMBER.search(claim)
        if match:
            return match
    return None


def _signed(text: str) -> str:
    """A minus in front of all belongs to the number, though a space follows it."""
    return re.sub(r"^[\s$]*[-−–] " + _AMOUNT, "-", text)


def _plain(text: str) -> str:
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
    r"""`\frac{-3}{4}` is -3/4, `\frac{miles}{hour}` a unit; one of anything else is no number, nor are its parts."""
    minus, above, below = (part.strip() for part in fraction.groups())
    if not re.search("[0-9π√]", above + below):
        return f"{minus} "
    if not (_TERM.fullmatch(above) and _TERM.fullmatch(below)):
        return f"{minus}√"
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


def _last_of_all(text: str) -> tuple[Fraction | None, bool]:
    """The last number of a text. It is looked for around the last digit first: a response has hundreds of words."""
    last = max(map(text.rfind, "0123456789"))
    breaks = list(_BREAK.finditer(text, max(0, last - NEAR), last))
    tail = text[breaks[-1].end() :] if breaks and (text.isascii() or not _OTHER_DIGIT.search(text)) else ""
    if ("\\" in text or "^{" in text) and ("sqrt" in text or _REACHED.search(tail)):
        tail = ""
    match = _last_match(_plain(tail)) if tail else None
    return (_value(match), _is_whole(match)) if match else _last(_plain(text))


def _last(text: str) -> tuple[Fraction | None, bool]:
    match = _last_match(text)
    return (_value(match), _is_whole(match)) if match else (None, False)


def _last_match(text: str) -> re.Match[str] | None:
    for run in reversed(list(_RUN.finditer(text))):
        if match := last_match(_NUMBER, text, run.start(), run.end() + 1):  # what stands behind it may forbid a number
            return match
    return None


def _is_whole(match: re.Match[str]) -> bool:
    """Whether its sentence has ended: `42.` may become 42.5, and 42 eggs be half of all."""
    return sentence(match.string, match.end())[1]


def _value(match: re.Match[str]) -> Fraction | None:
    sign, inner, value, exponent, power, divisor, irrational = match.groups()
    if match.end() - match.start() > LONGEST_NUMBER or irrational:
        return None
    size = Fraction(int(value) if value.isdecimal() else value.replace(",", ""))
    if exponent or power or divisor:
        exponent, power, divisor = int(exponent or 0), int(power or 1), Fraction((divisor or "1").replace(",", ""))
        if max(abs(exponent), abs(power) * len(value)) > LONGEST_NUMBER or not divisor or (not size and power < 0):
            return None
        size = (size * Fraction(10) ** exponent) ** power / divisor
    return -size if (sign or inner) == "-" else size
