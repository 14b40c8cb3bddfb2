"""From the command line to values, with every complaint in one line."""

import argparse
import contextlib
import dataclasses
import io
import re
import shlex
import shutil
import sys
from textwrap import fill
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

from solera.errors import SoleraError

T = TypeVar("T")
LONGEST = 400
"""Characters of a complaint that are shown: a value in it may have thousands."""
WIDEST = 120
"""Characters of a line of help; longer ones are hard to follow, however wide the terminal."""


class Parser(argparse.ArgumentParser):
    """For commands whose options are not a run's fields."""

    def error(self, message: str) -> NoReturn:
        from solera.config import alike

        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        unknown = unknown or re.match(r"argument ACTION: invalid choice: '([^']*)'", message)
        stray = re.match(r"unrecognized arguments: (\S+)", message)
        hint = alike(unknown[1], self._known(), 1) if unknown else self._behind(stray[1]) if stray else ""
        raise SoleraError(f"{message}{hint} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def _behind(self, stray: str) -> str:
        """The option that a value too many stands behind."""
        before = self._given[: self._given.index(stray)] if stray in self._given else []
        options = [argument for argument in before if argument.startswith("--")]
        return f", behind {options[-1]}" if options else ""

    def _known(self) -> list[str]:
        """The actions of this command, its options and theirs."""
        actions = {
            name: parser
            for one in self._actions if isinstance(one, argparse._SubParsersAction)
            for name, parser in one.choices.items()
        }  # fmt: skip
        return [*actions, *(option for parser in (self, *actions.values()) for option in parser._option_string_actions)]


def parse(
    default: T, arguments: list[str], command: str, positional: str, description: str, flags: Any, first: str = ""
) -> T:
    """`default` with the command line's fields in place; `flags` is tyro's marker for how truth values are written.

    An argument that ends in `first` and belongs to no option should have stood before them.
    """
    import tyro

    from solera.cli.values import complaint as wrong_values

    arguments = [{"true": "True", "false": "False"}.get(argument, argument) for argument in arguments]  # as in TOML
    complaint, shown = io.StringIO(), Overheard()
    if {"-h", "--help"} & set(arguments):
        _explain(type(default))
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(shown):
            return tyro.cli(
                type(default), args=arguments, default=default, prog=f"solera {command} {positional}".strip(),
                use_underscores=True, description="", config=(flags,),
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            usage, _, options = shown.getvalue().partition("\n\n")
            print(f"{usage}\n\n{wrapped(description)}\n\n{options}", end="")
            raise
        said = _one_line(complaint.getvalue(), default)
        misplaced = _misplaced(said, arguments, command, first) if first else ""
        said = f"{said}{misplaced}" if misplaced else wrong_values(type(default), arguments, flags) or said
        raise SoleraError(f"{said} (see solera {command} --help)") from None


class Overheard(io.StringIO):
    """What would be printed, with the frames and colours that it would have there."""

    encoding = property(lambda self: sys.__stdout__ and sys.__stdout__.encoding)

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def wrapped(text: str) -> str:
    """Paragraphs as wide as the terminal; lines of an indented one, examples, stay as they are."""
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else filled(" ".join(part.split())) for part in paragraphs)


def filled(paragraph: str, indent: str = "") -> str:
    """As wide as the terminal; `indent` begins every line but the first."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return fill(paragraph, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _explain(room: Any) -> None:
    """Hand tyro each field's help as one paragraph: what it reads from the source keeps the breaks there."""
    import tyro

    from solera.config import help_of

    explained = help_of(room)
    for name, hint in room.__annotations__.items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            _explain(kind)
        elif name in explained:
            room.__annotations__[name] = Annotated[(kind, tyro.conf.arg(help=explained[name]), *marks)]


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


def _misplaced(said: str, arguments: list[str], command: str, ending: str) -> str:
    """For a file behind the options, the command with it in front. The box breaks long names: blanks do not count."""
    for place, argument in enumerate(arguments):
        alone = "".join(f"Unrecognized options: {argument}".split())
        if argument.endswith(ending) and "".join(said.split()) == alone:
            rest = [*arguments[:place], *arguments[place + 1 :]]
            return f"; the file comes first: {shlex.join(['solera', command, argument, *rest])}"
    return ""


def _hint(unknown: str, box: str, default: Any) -> str:
    """Options that the message suggests: those of the unknown one's own name, else the first; or its room's fields."""
    from solera.config import SYNONYMS

    suggested = re.findall(r"^[│ ]{4,}(?:--[\w.]+, )*(--[\w.]+)", box, re.MULTILINE)  # the short alias is last
    room, _, name = unknown.rpartition(".")
    if name in SYNONYMS:
        name = SYNONYMS[name]
        homes = (key.name for key in dataclasses.fields(default) if hasattr(getattr(default, key.name), name))
        suggested = [f"--{home}.{name}" for home in homes]
    own = [option for option in suggested if re.split(r"[.-]", option)[-1] == name]
    if suggested:
        return f"; did you mean {' or '.join(own or suggested[:1])}?"
    fields = dataclasses.fields(getattr(default, room)) if hasattr(default, room) else ()
    return f"; {room} has {', '.join(field.name for field in fields)}" if fields else ""
