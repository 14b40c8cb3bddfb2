"""Replacements for characters that the terminal's encoding lacks, such as those in formulas and file names."""

import codecs
import io
import sys
import unicodedata

PLAIN = {
    "−": "-", "–": "-", "·": "*", "×": "x", "±": "+-", "²": "^2", "½": "1/2", "ℓ": "l", "Σ": "sum", "∇": "grad ",
    "≤": "<=", "≥": ">=", "→": "->", "⇄": "<->", "√": "sqrt", "°": " deg",
}  # fmt: skip
"""Replacements, except for Greek letters."""


def print_any_character() -> None:
    """Print a replacement for any character that the terminal cannot encode, instead of failing."""
    codecs.register_error("solera", _in_place_of)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="solera")


def _in_place_of(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(plain, error.object[error.start : error.end])), error.end


def plain(character: str) -> str:
    """The name of a Greek letter, any other letter without its accent, or a question mark.

    >>> [plain(character) for character in "ρé雪"]
    ['rho', 'e', '?']
    """
    if character in PLAIN:
        return PLAIN[character]
    script, _, letter = unicodedata.name(character, "").partition(" LETTER ")
    if script.startswith("GREEK"):
        return letter.lower()
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"
