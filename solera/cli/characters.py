"""Characters that a terminal may lack: formulas, intervals and the names of files are full of them."""

import codecs
import io
import sys
import unicodedata

PLAIN = {
    "−": "-", "–": "-", "·": "*", "×": "x", "±": "+-", "²": "^2", "½": "1/2", "ℓ": "l", "Σ": "sum", "∇": "grad ",
    "≤": "<=", "≥": ">=", "→": "->", "⇄": "<->", "√": "sqrt", "°": " deg",
}  # fmt: skip
"""What stands for them, Greek letters aside."""


def print_any_character() -> None:
    """Let none that the terminal's encoding lacks end a command."""
    codecs.register_error("solera", _in_place_of)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="solera")


def _in_place_of(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(plain, error.object[error.start : error.end])), error.end


def plain(character: str) -> str:
    """A Greek letter's name, any other letter without its accent, or a question mark.

    >>> [plain(character) for character in "ρé雪"]
    ['rho', 'e', '?']
    """
    if character in PLAIN:
        return PLAIN[character]
    script, _, letter = unicodedata.name(character, "").partition(" LETTER ")
    if script.startswith("GREEK"):
        return letter.lower()
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"
