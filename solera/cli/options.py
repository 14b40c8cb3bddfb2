"""From the command line to values, with every complaint in one line."""

import argparse
import contextlib
import dataclasses
import io
import re
from itertools import chain
from typing import Any, NoReturn, TypeVar

from solera.errors import SoleraError

T = TypeVar("T")
LONGEST = 400
"""Characters of a complaint that are shown: a value in it may have thousands."""


class Parser(argparse.ArgumentParser):
    """For commands whose options are not a run's fields."""

    def error(self, message: str) -> NoReturn:
        from solera.config import alike

        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        hint = alike(unknown[1], self._known(), 1) if unknown else ""
        raise SoleraError(f"{message}{hint} (see {self.prog} --help)")

    def _known(self) -> list[str]:
        """Options of this command and of its actions."""
        below = [one.choices.values() for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        return [option for parser in (self, *chain(*below)) for option in parser._option_string_actions]


def parse(default: T, arguments: list[str], command: str, positional: str, description: str, flags: Any) -> T:
    """`default` with the command line's fields in place; `flags` is tyro's marker for how truth values are written."""
    import tyro

    arguments = [{"true": "True", "false": "False"}.get(argument, argument) for argument in arguments]  # as in TOML
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                type(default), args=arguments, default=default, prog=f"solera {command} {positional}".strip(),
                use_underscores=True, description=description, config=(flags,),
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            raise
        raise SoleraError(f"{_one_line(complaint.getvalue(), default)} (see solera {command} --help)") from None


def _one_line(box: str, default: Any) -> str:
    """The first paragraph of a boxed message, and what may have been meant.

    Off UTF-8 the box has no sides, and its title is a paragraph of its own.
    """
    lines = [line.strip(" │") for line in box.splitlines()]
    paragraphs = re.split(r"\n[─-]{3,}\n", "\n".join(lines))
    text = paragraphs[0].partition("\n")[2] if box.startswith("╭") else paragraphs[1]
    first = " ".join(text.split())
    shown = first if len(first) <= LONGEST else f"{first[:LONGEST]}..."
    unknown = re.match(r"Unrecognized options: --([\w.]+)", first)
    return shown + (_hint(unknown[1], box, default) if unknown else "")


def _hint(unknown: str, box: str, default: Any) -> str:
    """Options that the message suggests: those of the unknown one's own name, else the first; or its room's fields."""
    suggested = re.findall(r"^[│ ]{4,}(?:--[\w.]+, )*(--[\w.]+)", box, re.MULTILINE)  # the short alias is last
    room, _, name = unknown.rpartition(".")
    own = [option for option in suggested if re.split(r"[.-]", option)[-1] == name]
    if suggested:
        return f"; did you mean {' or '.join(own or suggested[:1])}?"
    fields = dataclasses.fields(getattr(default, room)) if hasattr(default, room) else ()
    return f"; {room} has {', '.join(field.name for field in fields)}" if fields else ""
