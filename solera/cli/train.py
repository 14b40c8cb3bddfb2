"""`solera train`: from a TOML file and options to a run."""

import contextlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solera.cli.options import parse
from solera.errors import SoleraError

if TYPE_CHECKING:
    from rich.console import Console

    from solera.config import Config
    from solera.running import Result

DATA = (".jsonl", ".parquet")
"""What problems come in, and no config."""
HELP = """Train a model. Fields come from FILE.toml where one is given, then from the options below; the resolved
config, the metrics, the store of all rollouts, a plot, a report and the trained model land in the run's folder.

  solera train                                    embedded model, 20 seconds
  solera train recipes/demo.toml --run.seed 7     a recipe with another seed
  solera train --sync.period 1 --learn.passes 4   four passes, data on-policy
  solera train --resume runs/NAME                 go on from the last checkpoint
                                                  (takes no other options)

`solera algorithms` lists the objectives, `solera algorithms NAME` shows one with all its fields.
"""


def run(arguments: list[str]) -> int:
    import tyro

    from solera import config as configuration

    if "--resume" in arguments:
        if len(arguments) != 2 or arguments[0] != "--resume":
            folder = next(iter(arguments[arguments.index("--resume") + 1 :]), "")
            named = folder if folder and not folder.startswith("-") else "runs/NAME"
            command = shlex.join(["solera", "train", "--resume", named])
            raise SoleraError(f"--resume comes alone, for the run's config is in its folder: {command}")
        from solera.resuming import resumable

        resumable(Path(arguments[1]))
        return _train_with(lambda running, console: running.resume(Path(arguments[1]), console))
    file = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    if file and file.suffix.lower() in DATA:
        command = shlex.join(["solera", "train", "--task", "jsonl", "--task.path", str(file)])
        raise SoleraError(f"{file}: a run is described by a TOML file; to train on this one: {command}")
    base = configuration.load(file) if file else configuration.Config()
    config, marker = base, tyro.conf.FlagConversionOff
    if arguments:
        config = parse(base, arguments, "train", "[FILE.toml]", HELP, marker, first="" if file else ".toml")
    try:
        _refuse_early(config)
    except SoleraError as error:
        if file is None:
            raise
        raise configuration.located(error, file, config) from error
    return _train_with(lambda running, console: running.train(config, console))


def _train_with(start: "Callable[[Any, Console], Result]") -> int:
    from solera.report.console import StandardOutput

    console = StandardOutput()
    with console.status("loading torch and transformers") if console.is_terminal else contextlib.nullcontext():
        from solera import running
    try:
        result = start(running, console)
    except running.InterruptedRunError as stopped:
        print(f"solera: {stopped}", file=sys.stderr)
        return 141 if console.reader_left else 130
    console.print(
        f"held-out accuracy {result.accuracy_before:.1%} before, {result.accuracy_after:.1%} after, in "
        f"{result.seconds:.0f} s\n"
        f"over all evaluations best {result.accuracy_max:.1%}, mean {result.accuracy_mean:.1%}\n"
        f"plot   {result.plot}\nreport {result.report}\nmodel  {result.model}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def _refuse_early(config: "Config") -> None:
    """What can be refused before torch is loaded, which takes seconds."""
    from solera.models.source import obtain
    from solera.objectives.table import resolve_config
    from solera.tasks.rewards import check_data, check_own

    config = resolve_config(config)
    obtain(config.model.path)
    columns = check_data(config)
    _refuse_places(config)
    check_own(config, columns)


def _refuse_places(config: "Config") -> None:
    """Data that cannot be read, and places where the run cannot write."""
    from solera.config import new_folder
    from solera.report.sinks import need_wandb
    from solera.store.database import place_of, refuse_taken
    from solera.store.exchange import check_data_files

    check_data_files(config.store.data, config.store.skip_bad)
    if config.report.wandb is not None:
        need_wandb()
    if config.run.name is not None:
        refuse_taken(place_of(config.store.url, new_folder(config)))
