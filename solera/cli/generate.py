"""`solera generate`: generate responses and store them, so that rewards can be added later."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Literal

import tyro

from solera.cli.options import parse
from solera.config import (
    LONGEST_NAME,
    CollectConfig,
    Config,
    EngineConfig,
    RunConfig,
    SamplingConfig,
    StoreConfig,
    TaskConfig,
    may_name,
)
from solera.config.fields import shown
from solera.config.tasks import TASK_FIELDS
from solera.errors import SoleraError, counted
from solera.evaluate.candidates import Author, author_of, settings
from solera.folder.beginning import read_own_code
from solera.folder.files import writable
from solera.folder.paths import GENERATED
from solera.objectives.table import resolve_config
from solera.run.order import Order, Written, check_out
from solera.store.lines import ORIGIN
from solera.tasks.jsonl import split_rows

SAY_EVERY = 10.0
"""Seconds between two progress lines if there is no terminal for a progress bar."""
ANSWERS_MAY_LACK = ("jsonl", "mixture")
"""Tasks whose files need answers for training, but not for generating."""
HELP = """Generate several responses to each prompt and save them in a store, with their log-probabilities and without
rewards. People or programs can add rewards later. Then a training run can learn from them. MODEL is a Hugging Face
folder, a hub name, `embedded`, or a run's folder; a run's task and sampling settings become the defaults below.

  solera generate embedded --task jsonl --task.path prompts.jsonl --out answers
  solera generate runs/NAME --prompts 500 --samples 8 --out runs/more

A file of prompts has one JSON object per line with a field `prompt`, which is text or chat messages. It needs no
answers. Next steps:

  solera data export answers answers.jsonl --text    read and judge them
  solera data reward answers rewards.jsonl    {"id": 17, "value": 1.0}
  solera train --store.data answers --draw.policy offline

Ctrl-C stops after the current responses. The same command continues where it stopped. With more --samples or --prompts
it adds what is missing.
"""


@dataclass(frozen=True)
class GenerateOptions:
    """What to generate, and where to save it."""

    out: str | None = None
    """Required. Folder for the responses: a new folder, a folder that this command made earlier (to continue), or a
    run's folder, whose store then imports the responses."""
    task: tyro.conf.FlagConversionOff[TaskConfig] = field(default_factory=TaskConfig)
    samples: int = CollectConfig.group_size
    """Responses per prompt."""
    prompts: int | None = None
    """Use the first so many problems of the task. Unset uses all problems of a file; a task that generates problems
    without end needs a number."""
    held_out: bool = False
    """Answer the task's held-out problems instead of its training problems. Training skips such responses."""
    max_tokens: Annotated[int, tyro.conf.arg(name="sampling.max_tokens", aliases=("--max_tokens",))] = (
        SamplingConfig.max_tokens
    )
    """Maximum length of a response, including the end token."""
    temperature: Annotated[float, tyro.conf.arg(name="sampling.temperature", aliases=("--temperature",))] = (
        SamplingConfig.temperature
    )
    """Sampling temperature."""
    origin: str | None = None
    """Origin recorded in the store. Default: model: and the name of the model or run."""
    export: str | None = None
    """At the end, export all responses of the store, with their text, to this file: JSON lines, or *.parquet."""
    url: Annotated[str | None, tyro.conf.arg(name="store.url", aliases=("--url",))] = StoreConfig.url
    """PostgreSQL database for the store, postgresql+psycopg://USER@HOST/DATABASE. Unset uses a file in the folder."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: Annotated[int, tyro.conf.arg(name="run.seed", aliases=("--seed",))] = RunConfig.seed
    """Seed of the sampled responses."""
    device: Annotated[Literal["auto", "cpu", "cuda"], tyro.conf.arg(name="run.device", aliases=("--device",))] = (
        RunConfig.device
    )
    """`auto` uses a GPU if there is one."""
    threads: Annotated[int, tyro.conf.arg(name="run.threads", aliases=("--threads",))] = RunConfig.threads
    """CPU threads. 0 uses one thread for models under five million parameters, otherwise all cores."""


def run(arguments: list[str]) -> int:
    named = bool(arguments) and not arguments[0].startswith("-")
    if not named and not {"-h", "--help"} & set(arguments):
        raise SoleraError("generate: no model given; put the model before the options (see solera generate --help)")
    model, rest = (arguments[0], arguments[1:]) if named else ("", arguments)
    base = settings([model] if named else [])
    options = _options(base, rest)
    if options.task.name != base.task.name:  # a run's data and template fit only its own task
        base = replace(base, task=TaskConfig(options.task.name))
        options = _options(base, rest)
    elif named and "task" in read_own_code(Path(model)):
        raise SoleraError(f"{model} was trained on a task in your own code: choose another, such as --task jsonl")
    order = _order(author_of(model), base, options)
    target = writable(Path(options.export), f"--export {options.export}") if options.export is not None else None
    return _generate(order, target)


def _options(base: Config, arguments: list[str]) -> GenerateOptions:
    sampling, seed = base.sampling, base.run.seed
    default = GenerateOptions(
        task=base.task, engine=base.engine, max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=seed
    )
    return parse(default, arguments, "generate", "MODEL", HELP, tyro.conf.FlagCreatePairsOff)


def _order(author: Author, base: Config, options: GenerateOptions) -> Order:
    """Check everything that can be checked before torch is loaded, which takes seconds."""
    if options.out is None:
        raise SoleraError("generate: --out is missing: give a folder for the responses, --out FOLDER")
    for name, number in (("samples", options.samples), ("prompts", options.prompts)):
        if number is not None and number < 1:
            raise SoleraError(f"--{name} is {number}; it must be at least 1")
    origin = f"model:{author.name}" if options.origin is None else options.origin
    if origin == "self" or not ORIGIN.fullmatch(origin):
        raise SoleraError(f"--origin is {origin!r}; it must be human, model:NAME or file:NAME")
    out = Path(options.out)
    if not may_name(out.absolute().name):
        raise SoleraError(
            f"--out is {shown(options.out)}; use letters, digits and . _ + = - only, at most {LONGEST_NAME} bytes, for "
            "the folder's name"
        )
    config = resolve_config(_config(author, base, options, out))
    _check_task(config, options)
    check_out(out)
    return Order(author, config, out, options.samples, options.prompts, options.held_out, origin)


def _config(author: Author, base: Config, options: GenerateOptions, out: Path) -> Config:
    """The settings of the responses as a run's config, which the `solera data` commands read."""
    task = options.task
    if task.name == "jsonl" and task.held_out_path is None and task.held_out_share is None:
        task = replace(task, held_out_share=0.0)  # every prompt of the file
    run = RunConfig(
        root=str(out.parent),
        name=out.absolute().name,
        seed=options.seed,
        device=options.device,
        threads=options.threads,
    )
    return Config(
        run=run, task=task, engine=options.engine, store=StoreConfig(url=options.url),
        model=replace(base.model, path=author.path), evaluate=replace(base.evaluate, threshold=None),
        sampling=SamplingConfig(options.temperature, options.max_tokens),
    )  # fmt: skip


def _check_task(config: Config, options: GenerateOptions) -> None:
    if config.task.prompt is not None:
        split_rows(config.task)
    elif options.prompts is None and not options.held_out:
        raise SoleraError(
            f"{config.task.name} generates problems without end: set how many to answer, such as --prompts 1000"
        )


def _generate(order: Order, target: Path | None) -> int:
    from functools import partial

    from rich.console import Console

    from solera.report.console import Attempting, loading
    from solera.run import saying

    notes = Console(stderr=True)
    say = partial(saying.say, notes)
    with loading(notes):
        from solera.run import generating
    from solera.run.interruption import Interruption

    stopping = "stopping after the current responses; press Ctrl-C again to stop at once"
    with Interruption(lambda _: say(stopping)) as interruption, Attempting(notes) as bar:
        progress = _lines(say) if not notes.is_terminal else lambda made, total: bar(order.author.name, made, total)
        written = generating.generate(order, say, interruption.wanted, progress)
    if target is not None:
        _export(order, target)
    _tell(order, written)
    return 0 if written.finished else 130


def _lines(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Print a line from time to time, for a log."""
    done, said = 0, monotonic()

    def advance(made: int, total: int) -> None:
        nonlocal done, said
        done += made
        if monotonic() - said >= SAY_EVERY:
            said = monotonic()
            say(f"{done} of {total} responses generated")

    return advance


def _export(order: Order, target: Path) -> None:
    from solera.models.loading import load_reader
    from solera.store.database import place_in
    from solera.store.exchange import export_rollouts

    count = export_rollouts(place_in(order.out), target, load_reader(order.author.path).codec)
    print(f"{counted(count, 'rollout')} exported to {target}")


def _tell(order: Order, written: Written) -> None:
    known = f", {written.before} of them from before" if written.before else ""
    if written.further:
        known += f"; it holds {counted(written.further, 'further response')} to them"
    total = counted(written.before + written.now, "response")
    if not written.finished:
        print(f"solera: stopped; {total} in {order.out}{known}; run the same command to continue", file=sys.stderr)
        return
    print(
        f"{total} to {counted(written.prompts, 'prompt')} in {order.out}{known}\n"
        f"judge   {shlex.join(['solera', 'data', 'export', str(order.out), 'FILE.jsonl', '--text'])}\n"
        f"reward  {shlex.join(['solera', 'data', 'reward', str(order.out), 'rewards.jsonl'])}"
    )
    if (order.out / GENERATED).is_file():
        print(f"train   {shlex.join(_training(order))}")
        if order.config.task.name in ANSWERS_MAY_LACK:
            print(
                "        this measures accuracy on two-digit sums; to measure it on problems of yours, with answers, "
                "add --task jsonl --task.path PROBLEMS.jsonl"
            )


def _training(order: Order) -> list[str]:
    """The command that trains on the responses once they are rewarded. Options with default values are left out."""
    config, default = order.config, Config()
    command = ["solera", "train", "--store.data", str(order.out), "--draw.policy", "offline"]
    if order.author.path != default.model.path:
        command += ["--model", order.author.path]
    if config.task.name not in (default.task.name, *ANSWERS_MAY_LACK):
        command += ["--task", config.task.name, *(["--task.path", config.task.path] if config.task.path else [])]
    if config.task.level != TASK_FIELDS.get(config.task.name, {}).get("level"):
        command += ["--task.level", str(config.task.level)]
    if config.sampling != default.sampling:
        command += ["--sampling.max_tokens", str(config.sampling.max_tokens)]
        command += ["--sampling.temperature", str(config.sampling.temperature)]
    if order.samples != default.collect.group_size:
        command += ["--collect.group_size", str(order.samples)]
    return command
