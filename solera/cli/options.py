"""From the command line to values, with every complaint in one line: tyro for a dataclass, argparse for the rest."""

import argparse
import contextlib
import io
import re
from typing import Any, NoReturn, TypeVar

from solera.errors import SoleraError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

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
    """The first paragraph of a boxed message, and the option it suggests."""
    lines = [re.sub(r"^[│|]\s*|\s*[│|]$", "", line) for line in box.splitlines() if line.startswith(("│", "|"))]
    paragraphs = "\n".join(lines).split("\n─")
    first = " ".join(paragraphs[0].split())
    suggestion = re.search(
        r"Perhaps you meant:\s*(?:--[\w.]+, )*(--[\w.]+)", " ".join(lines)
    )  # the short alias is last
    return first + (f"; did you mean {suggestion[1]}?" if suggestion else "")
