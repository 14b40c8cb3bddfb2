"""From the command line to values, with every complaint in one line."""

import argparse
import contextlib
import io
import re
from typing import Any, NoReturn, TypeVar

from solera.errors import SoleraError

T = TypeVar("T")
LONGEST = 400
"""Characters of a complaint that are shown: a value in it may have thousands."""


class Parser(argparse.ArgumentParser):
    """For commands whose options are not a run's fields."""

    def error(self, message: str) -> NoReturn:
        raise SoleraError(f"{message} (see {self.prog} --help)")


def parse(default: T, arguments: list[str], command: str, positional: str, description: str, flags: Any) -> T:
    """`default` with the command line's fields in place; `flags` is tyro's marker for how truth values are written."""
    import tyro

    arguments = [{"true": "True", "false": "False"}.get(argument, argument) for argument in arguments]  # as in TOML
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                type(default), args=arguments, default=default, prog=f"solera {command} {positional}",
                use_underscores=True, description=description, config=(flags,),
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            raise
        raise SoleraError(f"{_one_line(complaint.getvalue())} (see solera {command} --help)") from None


def _one_line(box: str) -> str:
    """The first paragraph of a boxed message, and the option it suggests.

    Off UTF-8 the box has no sides, and its title is a paragraph of its own.
    """
    lines = [line.strip(" │") for line in box.splitlines()]
    paragraphs = re.split(r"\n[─-]{3,}\n", "\n".join(lines))
    text = paragraphs[0].partition("\n")[2] if box.startswith("╭") else paragraphs[1]
    first = " ".join(text.split())
    suggestion = re.search(
        r"Perhaps you meant:\s*(?:--[\w.]+, )*(--[\w.]+)", " ".join(lines)
    )  # the short alias is last
    shown = first if len(first) <= LONGEST else f"{first[:LONGEST]}..."
    return shown + (f"; did you mean {suggestion[1]}?" if suggestion else "")
