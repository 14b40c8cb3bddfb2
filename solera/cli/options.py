"""Parse the command line, and report every mistake in one line."""

import argparse
import contextlib
import dataclasses
import io
import re
import shlex
import shutil
import sys
from textwrap import fill
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from solera.errors import SoleraError

T = TypeVar("T")
SIMPLE = (int, float, str)
WIDEST = 120
"""Maximum width of a help line. Longer lines are hard to read, even on a wide terminal."""


class Parser(argparse.ArgumentParser):
    """Parser of commands whose options are not fields of a run's config."""

    def error(self, message: str) -> NoReturn:
        raise SoleraError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        from solera.config import alike, perhaps

        given = list(sys.argv[1:] if args is None else args)
        actions = self._subcommands()
        if actions and not given:
            self.error(f"an action is missing; use one of {', '.join(actions)}")
        if actions and not given[0].startswith("-") and given[0] not in actions:
            self.error(f"unknown action {given[0]!r}{perhaps(given[0], actions)}")
        values, unknown = self.parse_known_args(given, namespace)
        if not unknown:
            return values
        if unknown[0].startswith("-"):
            options = [option for one in (self, *actions.values()) for option in one._option_string_actions]
            name = unknown[0].partition("=")[0]
            self.error(f"unknown option {name}{alike(name, options, 1)}")
        before = [argument for argument in given[: given.index(unknown[0])] if argument.startswith("--")]
        self.error(f"unexpected argument {unknown[0]}{f' after {before[-1]}' if before else ''}")

    def _subcommands(self) -> "dict[str, Parser]":
        return {
            name: parser
            for one in self._actions if isinstance(one, argparse._SubParsersAction)
            for name, parser in one.choices.items()
        }  # fmt: skip


def parse(
    default: T, arguments: list[str], command: str, positional: str, description: str, flags: Any, first: str = ""
) -> T:
    """Return `default` with the options of the command line applied.

    `flags` is tyro's marker for how booleans are written. `first` is the ending of a file that must come before the
    options; if it comes later, the error shows the corrected command. `--help SECTION` shows the options of one section
    of a config.
    """
    import tyro

    arguments = [{"true": "True", "false": "False"}.get(argument, argument) for argument in arguments]  # as in TOML
    helps = bool({"-h", "--help"} & set(arguments))
    if helps:
        _explain(type(default))
        if section := _section(default, arguments, command):
            default, arguments, description = section, ["--help"], ""
    else:
        _refuse(default, arguments, command, flags, first)
    shown = Capture()
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(shown):
            return tyro.cli(
                type(default), args=arguments, default=default, prog=f"solera {command} {positional}".strip(),
                use_underscores=True, description="", config=(flags,),
            )  # fmt: skip
    except SystemExit:
        if not helps:
            options = shlex.join(arguments)
            raise SoleraError(f"these options cannot be parsed: {options} (see solera {command} --help)") from None
        usage, _, options = shown.getvalue().partition("\n\n")
        print("\n\n".join(filter(None, [usage, wrapped(description), options])), end="")
        raise


def _section(default: Any, arguments: list[str], command: str) -> Any:
    """The section of `default` that is named after `--help`, or None."""
    from solera.config import perhaps

    place = next(n for n, argument in enumerate(arguments) if argument in {"-h", "--help"})
    named = next(iter(arguments[place + 1 :]), "-")
    sections = {name: hint for name, hint in type(default).__annotations__.items() if dataclasses.is_dataclass(hint)}
    if named.startswith("-") or not sections:
        return None
    if named not in sections:
        raise SoleraError(f"--help {named}: unknown section{perhaps(named, sections)} (see solera {command} --help)")
    return dataclasses.make_dataclass("Section", [(named, sections[named])])(getattr(default, named))


def _refuse(default: Any, arguments: list[str], command: str, flags: Any, first: str) -> None:
    """Refuse what tyro could not parse."""
    from solera.cli.values import complaint, surplus

    file = surplus(default, arguments, flags) if first else None
    if file is not None and file.endswith(first):
        rest = list(arguments)
        rest.remove(file)
        corrected = shlex.join(["solera", command, file, *rest])
        raise SoleraError(
            f"unexpected argument {file}; the file comes first: {corrected} (see solera {command} --help)"
        )
    if wrong := complaint(default, arguments, flags):
        elsewhere = command == "train" and re.fullmatch(r"unknown option \S+", wrong)
        names = "; docs/coming-from.md has the options of TRL, verl and others" if elsewhere else ""
        raise SoleraError(f"{wrong} (see solera {command} --help{names})")


class Capture(io.StringIO):
    """Captures help text, with the boxes and colours that it would have on the real standard output."""

    encoding = property(lambda self: sys.__stdout__ and sys.__stdout__.encoding)

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def wrapped(text: str) -> str:
    """Wrap paragraphs to the width of the terminal. Indented paragraphs (examples) stay as they are."""
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else filled(" ".join(part.split())) for part in paragraphs)


def filled(paragraph: str, indent: str = "") -> str:
    """Wrap one paragraph to the width of the terminal. `indent` starts every line except the first."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return fill(paragraph, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _explain(section: Any) -> None:
    """Give tyro each field's help as one paragraph. The help that tyro reads from the source keeps its line breaks."""
    import tyro

    from solera.config import help_of

    explained = help_of(section)
    for name, hint in section.__annotations__.items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            _explain(kind)
        elif name in explained:
            default = "" if explained[name].startswith("Required.") else _default
            about = tyro.conf.arg(help=explained[name], metavar=_written(kind), help_behavior_hint=default)
            section.__annotations__[name] = Annotated[(kind, about, *marks)]


def _written(kind: Any) -> str | None:
    """How a value of an option is written, if it may be unset or there may be several. Others are left to tyro.

    >>> _written(int | None), _written(tuple[str, ...]), _written(bool | None), _written(int)
    ('INT', '[STR ...]', '{true,false}', None)
    """
    chosen = [each for each in get_args(kind) if each not in (NoneType, Ellipsis)]
    if len(chosen) != 1 or len(get_args(kind)) == 1:
        return None
    one = getattr(chosen[0], "__supertype__", chosen[0])  # of a `NewType`
    if one is bool or get_origin(one) is Literal:
        name = f"{{{','.join(map(str, get_args(one) or ('true', 'false')))}}}"
    elif one in SIMPLE:
        name = one.__name__.upper()
    else:
        return None
    return f"[{name} ...]" if get_origin(kind) is tuple else name


def _default(value: str) -> str:
    """What follows an option's help, as tyro writes it, but for "None" and for an empty list."""
    return f"(default: {'unset' if value == 'None' else value or 'none'})"
