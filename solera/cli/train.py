"""`solera train`: start or resume a run from a TOML file and options."""

import os
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
    from solera.run.running import Result

HELP = """Train a model. Settings come from FILE.toml, if given, and then from the options below. The run's folder gets
the resolved config, the metrics, the store of all rollouts, a plot, a report and the trained model.

  solera train                                    embedded model, 20 seconds
  solera train recipes/demo.toml --run.seed 7     a recipe with another seed
  solera train --sync.period 1 --learn.passes 4   four passes, data on-policy
  solera train --help sync                        options of one section
  solera train --resume runs/NAME                 resume from last checkpoint
  solera train --resume runs/NAME --run.steps 500 extend it, finished or not
  solera train --resume runs/NAME --from 40       go back to step 40; later
                                                  checkpoints are removed

Sections: {sections}.

A resumed run can change only these settings: {safe}.

`solera algorithms` lists the objectives; `solera algorithms NAME` shows one with all its fields.
"""


def run(arguments: list[str]) -> int:
    import tyro

    from solera import config as configuration

    named = {argument.partition("=")[0] for argument in arguments}
    if "--resume" in named:
        return _resume(arguments)
    if "--from" in named:
        raise SoleraError("--from needs --resume FOLDER (see solera train --help)")
    file = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    if file and file.suffix.lower() in configuration.DATA_FILES:
        command = shlex.join(["solera", "train", "--task", "jsonl", "--task.path", str(file)])
        raise SoleraError(f"{file} is data, not a TOML config; to train on it: {command}")
    if file and os.path.isdir(file):  # Path.is_dir raises if the name is too long
        resume, model = (shlex.join(["solera", "train", option, str(file)]) for option in ("--resume", "--model"))
        raise SoleraError(f"{file} is a folder, not a TOML config; to resume a run: {resume}; for a model: {model}")
    base = configuration.load(file) if file else configuration.Config()
    config, marker = base, tyro.conf.FlagConversionOff
    if arguments:
        config = parse(base, arguments, "train", "[FILE.toml]", _help(), marker, first="" if file else ".toml")
    try:
        _refuse_early(config)
    except SoleraError as error:
        if file is None:
            raise
        raise configuration.located(error, file, config) from error
    return _train_with(lambda running, console: running.train(config, console))


def _resume(arguments: list[str]) -> int:
    """Check what can be checked before torch is loaded, which takes seconds. Then resume."""
    import tyro

    from solera.folder.files import alone
    from solera.run.resuming import changes_between, resumable, settings_of

    named, arguments = _take(arguments, "--resume", "a run's folder, such as runs/NAME")
    step, arguments = _take(arguments, "--from", "the step of a checkpoint, such as 40")
    folder, start = Path(named or ""), _step(step)
    if arguments and not arguments[0].startswith("-"):
        command = shlex.join(["solera", "train", "--resume", str(folder)])
        raise SoleraError(f"{arguments[0]}: --resume takes no file, because the run's folder has its config: {command}")
    before, changes = settings_of(folder), {}
    if arguments:
        after = parse(before, arguments, "train", "--resume FOLDER", _help(), tyro.conf.FlagConversionOff)
        changes = changes_between(before, after)
    with alone(folder):
        resumable(folder, (), changes, start)
    return _train_with(
        lambda running, console: running.resume(folder, console, changes=changes, start=start),
        since=" since it was resumed",
    )


def _take(arguments: list[str], option: str, wanted: str) -> tuple[str | None, list[str]]:
    """The value of an option, written `--option VALUE` or `--option=VALUE`, and the other arguments."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2], arguments[:place] + arguments[place + 1 :]
        if argument == option:
            value = next(iter(arguments[place + 1 :]), "-")
            if value.startswith("-"):
                raise SoleraError(f"{option} needs {wanted} (see solera train --help)")
            return value, arguments[:place] + arguments[place + 2 :]
    return None, arguments


def _step(text: str | None) -> int | None:
    """A step number, given as a number or as the name of its checkpoint folder."""
    if text is not None and not text.removeprefix("step-").isdecimal():
        raise SoleraError(f"--from is {text!r}; it must be the step of a checkpoint, such as 40")
    return None if text is None else int(text.removeprefix("step-"))


def _help() -> str:
    from solera.config import SAFE, Config

    return HELP.format(safe=", ".join(SAFE), sections=", ".join(Config.__annotations__))


def _train_with(start: "Callable[[Any, Console], Result]", since: str = "") -> int:
    from rich.text import Text

    from solera.report.console import StandardOutput, loading

    console = StandardOutput()
    with loading(console):
        from solera.run import running
    try:
        result = start(running, console)
    except running.InterruptedRunError as stopped:
        print(f"solera: {stopped}", file=sys.stderr)
        return 141 if console.reader_left else 130
    pages = {"plot": result.plot, "report": result.report}
    told = (
        f"held-out accuracy {result.accuracy_before:.1%} before, {result.accuracy_after:.1%} after, in "
        f"{result.seconds:.0f} s{since}\n"
        f"{_held_out_reward(result.metrics)}"
        f"all evaluations: best {result.accuracy_max:.1%}, mean {result.accuracy_mean:.1%}\n"
        + "".join(f"{name:6} {path}\n" for name, path in pages.items() if path) + f"model  {result.model}"
    )  # fmt: skip
    console.print(Text(told), soft_wrap=True)
    return 0


def _refuse_early(config: "Config") -> None:
    """Check what can be checked before torch is loaded, which takes seconds."""
    from solera.models.source import obtain
    from solera.objectives.table import resolve_config
    from solera.tasks.rewards import check_data, check_own

    config = resolve_config(config)
    obtain(config.model.path)
    columns = check_data(config)
    _refuse_places(config)
    check_own(config, columns)


def _refuse_places(config: "Config") -> None:
    """Refuse data that cannot be read, and places that the run cannot write to."""
    from solera.folder.beginning import new_folder
    from solera.report.sinks import need_wandb
    from solera.store.database import place_of, refuse_taken
    from solera.store.exchange import check_data_files

    check_data_files(config.store.data, config.store.skip_bad)
    if config.report.wandb is not None:
        need_wandb()
    if config.run.name is not None:
        refuse_taken(place_of(config.store.url, new_folder(config)))


def _held_out_reward(rows: "list[dict[str, float]]") -> str:
    """A line about the mean held-out reward, unless it is the accuracy."""
    evaluated = [row for row in rows if "eval/reward" in row]
    if all(row["eval/reward"] == row["eval/pass@1"] for row in evaluated):
        return ""
    return f"held-out reward {evaluated[0]['eval/reward']:.3g} before, {evaluated[-1]['eval/reward']:.3g} after\n"
