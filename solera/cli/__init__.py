"""The command `solera`. Heavy imports wait until a command needs them, so that `--help` answers at once."""

import importlib
import os
import signal
import sys
import traceback

from solera.cli.characters import print_any_character
from solera.errors import SoleraError

COMMANDS = {
    "train": "train a model, or resume a run (--resume FOLDER)",
    "eval": "evaluate and compare models on held-out problems",
    "generate": "generate responses to prompts; add rewards later",
    "data": "import, export and check a run's rollouts and rewards",
    "sweep": "train a grid of runs in parallel, and compare them",
    "report": "write an HTML page about a run, or comparing several",
    "algorithms": "list the objectives, or describe one (NAME)",
    "bench": "time training steps, optionally against TRL",
    "lab": "exact results on policies small enough to enumerate",
}
"""Each command is a module of this package with `run(arguments) -> exit status`."""

LONGEST_WORD, LONGEST = 400, 900
"""Maximum length of a word and of a line in an error message. A value in it may have thousands of characters."""

USAGE = """usage: solera COMMAND [OPTIONS]

Train language models with GRPO and its relatives, on fresh data, old data, and
data written by other models.

commands:
{commands}

`solera COMMAND --help` describes a command and all its options.

options:
  --help      show this help
  --version   show the version
  --debug     show the full traceback of an error (before or after a command)
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0 success, 1 a system error, 2 a user's mistake, 130 interrupted, 141
    the reader of the output is gone."""
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
        # Otherwise Python tries to flush stdout again at exit and prints an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _complain(f"{error.filename or 'input or output'}: {error.strerror or error}", 1, debug)
    except MemoryError:
        return _complain("there is too little memory (--debug shows where it ended)", 1, debug)
    except KeyboardInterrupt as stop:
        return _complain(str(stop) or "interrupted", 130, debug)


def command() -> int:
    """`main` in a process of its own. Ctrl-C while the process ends does not print a traceback."""
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return status


def _complain(message: str, status: int, debug: bool) -> int:
    """Print the message as one line, after the traceback if `debug` is set."""
    if debug:
        traceback.print_exc()
    words = "".join(character if character.isprintable() else " " for character in message).split()
    line = " ".join(word if len(word) <= LONGEST_WORD else f"{word[:100]}..." for word in words)
    if len(line) > LONGEST:  # keep the start (what is wrong) and the end (what to do)
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
