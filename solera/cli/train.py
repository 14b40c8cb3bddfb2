"""`solera train`: from a TOML file and options to a run."""

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solera.errors import SoleraError

if TYPE_CHECKING:
    from rich.console import Console

    from solera.build import Result
    from solera.config import Config

HELP = """Train a model. Fields come from FILE.toml where one is given, then from the options below; the resolved
config, the metrics, the store of all rollouts, a plot and the trained model land in the run's folder.

  solera train                                      the embedded model on arithmetic, v=10, 20 seconds
  solera train recipes/demo.toml --run.seed 7       a recipe with another seed
  solera train --sync.period 1 --learn.passes 4     on-policy data, each batch learned from four times
  solera train --resume runs/NAME                   go on with a run from its last checkpoint (no other options)

Objectives, and the values of objective fields left unset:

"""


def run(arguments: list[str]) -> int:
    from solera import config as configuration

    if "--resume" in arguments:
        if len(arguments) != 2 or arguments[0] != "--resume":
            raise SoleraError("--resume takes the run's folder and nothing else: its config is in there")
        return _train_with(lambda build, console: build.resume(Path(arguments[1]), console))
    arguments = [{"true": "True", "false": "False"}.get(argument, argument) for argument in arguments]  # as in TOML
    file = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    config = _overridden(configuration.load(file) if file else configuration.Config(), arguments)
    _refuse_early(config)
    return _train_with(lambda build, console: build.train(config, console))


def _train_with(start: "Callable[[Any, Console], Result]") -> int:
    from rich.console import Console

    console = Console()
    with console.status("loading torch and transformers") if console.is_terminal else contextlib.nullcontext():
        from solera import build
    try:
        result = start(build, console)
    except build.InterruptedRunError as stopped:
        print(f"solera: {stopped}", file=sys.stderr)
        return 130
    console.print(
        f"held-out accuracy {result.accuracy_before:.1%} before, {result.accuracy_after:.1%} after "
        f"({result.seconds:.0f} s of training)\nplot   {result.plot}\nmodel  {result.model}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def _refuse_early(config: "Config") -> None:
    """What can be refused before torch is loaded, which takes seconds."""
    from solera.config import new_folder
    from solera.models.source import find
    from solera.objectives.table import resolve_config
    from solera.tasks.jsonl import read_split
    from solera.tasks.rewards import check_functions, graders

    config = resolve_config(config)
    find(config.model.path)
    check_functions(config.reward)
    if config.task.name == "jsonl":
        read_split(config.task, graders(config))
    if config.run.name is not None:
        new_folder(config)


def _overridden(base: "Config", arguments: list[str]) -> "Config":
    """The config with the command line's fields in place; tyro's boxed complaints become one line."""
    if not arguments:
        return base
    import tyro

    from solera.config import Config
    from solera.objectives.table import describe

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                Config, args=arguments, default=base, prog="solera train [FILE.toml]", use_underscores=True,
                description=HELP + describe(), config=(tyro.conf.FlagConversionOff,),
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            raise
        raise SoleraError(_one_line(complaint.getvalue())) from None


def _one_line(box: str) -> str:
    """The first paragraph of a boxed message, and the option it suggests."""
    lines = [re.sub(r"^[│|]\s*|\s*[│|]$", "", line) for line in box.splitlines() if line.startswith(("│", "|"))]
    paragraphs = "\n".join(lines).split("\n─")
    first = " ".join(paragraphs[0].split())
    suggestion = re.search(r"Perhaps you meant:\s*(--\S+)", " ".join(lines))
    return first + (f"; did you mean {suggestion[1]}?" if suggestion else "") + " (see solera train --help)"
