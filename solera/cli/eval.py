"""`solera eval`: evaluate models on held-out problems, and print a table or write JSON."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from solera.cli.options import parse
from solera.config import (
    CollectConfig,
    Config,
    EngineConfig,
    EvaluateConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    override,
)
from solera.errors import SoleraError
from solera.evaluate.candidates import candidates, refuse_own_code, settings
from solera.evaluate.evaluation import check_k
from solera.folder.files import writable, write_whole
from solera.objectives.table import resolve_config
from solera.tasks.rewards import check_data, check_own

PIPE_WIDTH = 200
"""Table width if the output is not a terminal. A wrapped table is hard to search."""

HELP = """Evaluate models on the held-out problems of a task, greedily and, with --samples, also by sampling. Each model
is compared with the first one on the same problems. MODEL is a Hugging Face folder, a hub name, `embedded`, or a
run's folder. If a MODEL is a run's folder, options that you do not set come from the config of the (first) run.

  solera eval embedded                           greedy pass@1 on arithmetic
  solera eval embedded runs/NAME --samples 16    and avg@16, pass@16, compared
  solera eval runs/NAME --samples 16 --k 1 4     pass@1 and pass@4 of 16 samples
  solera eval runs/NAME --checkpoints            every checkpoint, max and mean
  solera eval runs/NAME --json result.json       all numbers as JSON
"""


@dataclass(frozen=True)
class EvalOptions:
    """How models are evaluated."""

    task: tyro.conf.FlagConversionOff[TaskConfig] = field(default_factory=TaskConfig)
    reward: tyro.conf.FlagConversionOff[RewardConfig] = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    max_tokens: Annotated[int, tyro.conf.arg(name="sampling.max_tokens", aliases=("--max_tokens",))] = (
        SamplingConfig.max_tokens
    )
    """Maximum length of a response, including the end token."""
    problems: Annotated[int, tyro.conf.arg(aliases=("--evaluate.problems",))] = EvaluateConfig.problems
    """Number of held-out problems, the same for every model."""
    samples: Annotated[int, tyro.conf.arg(aliases=("--evaluate.samples",))] = EvaluateConfig.samples
    """Sampled attempts per problem, in addition to the greedy one (n in avg@n)."""
    temperature: Annotated[float | None, tyro.conf.arg(aliases=("--evaluate.temperature",))] = None
    """Temperature of the sampled attempts. Default: `evaluate.temperature` of the run, if it is above 0. Otherwise, if
    `samples` is above 1, the temperature that the run trained with, or 1 without a run. Otherwise nothing is
    sampled."""
    top_p: Annotated[float, tyro.conf.arg(aliases=("--evaluate.top_p",))] = EvaluateConfig.top_p
    """Nucleus sampling: share of the probability to sample from."""
    threshold: Annotated[float | None, tyro.conf.arg(aliases=("--evaluate.threshold",))] = EvaluateConfig.threshold
    """An attempt passes if its reward is at least this. Default: 0.5, or 0.99 for a task gym:NAME."""
    seed: Annotated[int, tyro.conf.arg(aliases=("--run.seed",))] = RunConfig.seed
    """Seed of the sampled attempts."""
    errors: Annotated[Literal["stop", "missing"] | float, tyro.conf.arg(name="collect.errors")] = CollectConfig.errors
    """What to do if an episode fails: `stop`, leave it out (`missing`), or give it this number as its reward."""
    retries: Annotated[int, tyro.conf.arg(name="collect.retries")] = CollectConfig.retries
    """How many times to retry a failed episode before `collect.errors` applies."""
    device: Annotated[Literal["auto", "cpu", "cuda"], tyro.conf.arg(aliases=("--run.device",))] = RunConfig.device
    """`auto` uses a GPU if there is one."""
    threads: Annotated[int, tyro.conf.arg(aliases=("--run.threads",))] = RunConfig.threads
    """CPU threads. 0 uses one thread for models under five million parameters, otherwise all cores."""
    k: tuple[int, ...] = ()
    """Values of k for pass@k, up to `samples`. Default: `samples`."""
    checkpoints: bool = False
    """Evaluate all checkpoints in a run's folder as well as its final model, with their maximum and mean."""
    json: str | None = None
    """File for the result: settings, estimates, counts per problem, and comparisons."""


PLACES = {
    "task": None, "reward": None, "engine": None, "max_tokens": "sampling", "problems": "evaluate",
    "samples": "evaluate",
    "temperature": "evaluate", "top_p": "evaluate", "threshold": "evaluate", "seed": "run", "device": "run",
    "threads": "run", "errors": "collect", "retries": "collect",
}  # fmt: skip
"""The config section of each option. `None` means that the option is a section itself."""


def run(arguments: list[str]) -> int:
    count = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    if not count and not {"-h", "--help"} & set(arguments):
        raise SoleraError("eval: no model given; put the models before the options (see solera eval --help)")
    models, base = arguments[:count], settings(arguments[:count])
    options = _options(base, arguments[count:])
    if options.task.name != base.task.name:  # a run's data, rewards and threshold belong to its own task
        base = replace(base, task=TaskConfig(options.task.name), reward=RewardConfig())
        base = override(base, "evaluate", threshold=None)
        options = _options(base, arguments[count:])
    refuse_own_code(models)
    config = resolve_config(composed(base, options))
    columns = check_data(config)
    check_k(options.k, config)
    candidates(models, options.checkpoints)
    target = writable(Path(options.json), f"--json {options.json}") if options.json is not None else None
    check_own(config, columns)
    result = _evaluate(models, config, options)
    if target is not None:
        write_whole(target, json.dumps(result.as_json(), indent=1, allow_nan=False) + "\n")
    return 0


def _options(base: Config, arguments: list[str]) -> EvalOptions:
    return parse(options_of(base), arguments, "eval", "MODEL [MODEL ...]", HELP, tyro.conf.FlagCreatePairsOff)


def options_of(config: Config) -> EvalOptions:
    """The default options: the values of the config."""
    values = {name: getattr(getattr(config, section) if section else config, name) for name, section in PLACES.items()}
    return EvalOptions(**{**values, "temperature": config.evaluate.temperature or None})


def composed(config: Config, options: EvalOptions) -> Config:
    """The config with the options applied."""
    if options.temperature is None:
        options = replace(options, temperature=config.sampling.temperature if options.samples > 1 else 0.0)
    for name, section in PLACES.items():
        value = {name: getattr(options, name)}
        config = override(config, section, **value) if section else replace(config, **value)
    return config


def _evaluate(models: list[str], config: Config, options: EvalOptions) -> Any:
    from rich.console import Console

    from solera.report.console import Attempting, loading, results_console
    from solera.report.evaluation import show

    notes, console = Console(stderr=True), results_console(PIPE_WIDTH)
    with loading(notes):
        from solera.run.evaluating import evaluate_models
    with Attempting(notes) as progress:
        result = evaluate_models(models, config, options.k, options.checkpoints, notes, progress)
    show(result, console)
    return result
