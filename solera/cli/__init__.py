"""The command `solera`. Heavy imports wait until a command needs them, so that help answers at once."""

import importlib
import os
import sys
import traceback

from solera.cli.characters import print_any_character
from solera.errors import SoleraError

COMMANDS = {
    "train": "train a model, or go on with a run (--resume FOLDER)",
    "eval": "evaluate models on held-out problems, and compare them",
    "generate": "let a model answer prompts; rewards can come later",
    "data": "rollouts and rewards in and out of a run's store",
    "sweep": "train a grid of runs side by side, and compare them",
    "report": "write a page to look into a run, or to compare several",
    "algorithms": "list the objectives, or explain one of them (NAME)",
    "bench": "time whole training steps, and TRL's beside them",
    "lab": "exact answers on policies small enough to enumerate",
}
"""Each command is a file of this room with `run(arguments) -> exit status`."""

LONGEST_WORD, LONGEST = 400, 900
"""Characters of a word and of a line that are shown: a value in it may have thousands."""

USAGE = """usage: solera COMMAND [OPTIONS]

Group-relative policy optimisation on experience of any age and origin.

commands:
{commands}

`solera COMMAND --help` explains a command and every field it takes.

options:
  --help      show this
  --version   show the version
  --debug     before or after a command: show the whole traceback of an error
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 the machine's fault, 2 the user's mistake, 130 interrupted, 141
    nobody reads the output any more."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    print_any_character()
    try:
        status = _dispatch([argument for argument in arguments if argument != "--debug"])
        sys.stdout.flush()
        return status
    except SoleraError as error:
        return _complain(str(error), 2, debug)
    except BrokenPipeError:
        # Python would try to write the rest once more when it exits, and complain about that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _complain(f"{error.filename or 'input or output'}: {error.strerror or error}", 1, debug)
    except KeyboardInterrupt as stop:
        return _complain(str(stop) or "interrupted", 130, debug)


def _complain(said: str, status: int, debug: bool) -> int:
    """One line, whatever names and values stand in it; with `debug`, after the traceback."""
    if debug:
        traceback.print_exc()
    words = "".join(character if character.isprintable() else " " for character in said).split()
    line = " ".join(word if len(word) <= LONGEST_WORD else f"{word[:100]}..." for word in words)
    if len(line) > LONGEST:  # what is wrong stands first, and what to do about it last
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 3 :]}"
    print(f"solera: {line}", file=sys.stderr)
    return status


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:12}{does}" for name, does in COMMANDS.items())), end="")
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("solera"))
        return 0
    if arguments[0] not in COMMANDS:
        from solera.config import perhaps

        raise SoleraError(f"unknown command {arguments[0]!r}{perhaps(arguments[0], COMMANDS)} (see solera --help)")
    return importlib.import_module(f"solera.cli.{arguments[0]}").run(arguments[1:])
