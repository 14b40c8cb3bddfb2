"""Find the models to evaluate and their settings, before torch is loaded."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from solera import config as configuration
from solera.config import Config, EngineConfig, SyncConfig
from solera.errors import SoleraError
from solera.folder.beginning import read_own_code
from solera.folder.paths import CHECKPOINTS, CONFIG, MODEL
from solera.models.source import obtain


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate: its name in tables, its path, and the run that it is a checkpoint of."""

    name: str
    path: str
    run: str | None = None


def candidates(models: list[str], checkpoints: bool = False) -> list[Candidate]:
    """Find or refuse each model. With `checkpoints`, a run's folder stands for all its checkpoints."""
    if not models:
        raise SoleraError("evaluation: give at least one model: a folder, a hub name, embedded, or a run's folder")
    if checkpoints and not any(map(is_run, models)):
        raise SoleraError("--checkpoints needs a run's folder (one with config.toml), but none was given")
    found = list[Candidate]()
    for model in models:
        if not is_run(model):
            obtain(model)
            found.append(Candidate(model, model))
        elif checkpoints:
            found += _checkpoints(model)
        elif _finished(model).is_dir():
            found.append(Candidate(model, str(_finished(model))))
        else:
            _checkpoints(model)  # refuses a run that has none either
            raise SoleraError(
                f"{model}: the run has no finished model yet; evaluate its checkpoints with --checkpoints"
            )
    return found


@dataclass(frozen=True)
class Author:
    """A model that generates responses: the name for their origin, its path, and its run and version."""

    name: str
    path: str
    lineage: str | None = None
    """`None` if it belongs to no run, or the run has not recorded one."""
    version: int = 0
    """Number of batches that the run had trained on; 0 without a lineage."""


def author_of(model: str) -> Author:
    """A run's finished model or, before there is one, its last checkpoint; or a model that was not trained here."""
    if not is_run(model):
        obtain(model)
        return Author(Path(model).name or model, model)
    folder, steps = Path(model), sorted((Path(model) / CHECKPOINTS).glob("step-*"))
    if not _finished(model).is_dir() and not steps:
        raise SoleraError(f"{model}: the run has neither a finished model nor a checkpoint yet")
    from solera.store.database import place_in
    from solera.store.reading import reading

    with reading(place_in(folder)) as store:
        lineage = store.lineage()
    version = _config(model).run.steps if _finished(model).is_dir() else int(steps[-1].name.removeprefix("step-"))
    path = _finished(model) if _finished(model).is_dir() else steps[-1] / MODEL
    return Author(folder.absolute().name, str(path), lineage, 0 if lineage is None else version)


def settings(models: list[str]) -> Config:
    """The config of the first run among the models; the defaults if there is none. The run's server may be gone, so the
    engine is the one inside the process unless another is asked for."""
    config = next((_config(model) for model in models if is_run(model)), Config())
    return replace(
        config, engine=EngineConfig(max_rows=config.engine.max_rows),
        sync=replace(config.sync, in_flight=SyncConfig.in_flight, transport=SyncConfig.transport),
    )  # fmt: skip


def refuse_own_code(models: list[str]) -> None:
    """Refuse runs whose task or rewards are the user's own code, because the config does not contain them."""
    for model in filter(is_run, models):
        if {"task", "rewards"} & set(read_own_code(Path(model))):
            raise SoleraError(
                f"{model} was trained with a task or rewards from your own code: evaluate it from Python "
                f"with solera.evaluate_models([{model!r}], task=...) or rewards=[...]"
            )


def other_tasks(models: list[str], config: Config) -> list[str]:
    """Runs that were trained on a different task than the config's."""
    return [model for model in models if is_run(model) and _config(model).task != config.task]


def is_run(model: str) -> bool:
    return os.path.isfile(Path(model) / CONFIG)  # unlike Path.is_file, False for a name that is too long


def _config(run: str) -> Config:
    return configuration.load(Path(run) / CONFIG)


def _finished(run: str) -> Path:
    return Path(run) / MODEL


def _checkpoints(run: str) -> list[Candidate]:
    """A run's checkpoints, oldest first, then its finished model. The checkpoint of the last step has the same
    weights."""
    steps = sorted((Path(run) / CHECKPOINTS).glob("step-*"))
    found = [Candidate(str(step), str(step / MODEL), run) for step in steps]
    if _finished(run).is_dir():
        last = f"step-{_config(run).run.steps:06d}"
        found = [candidate for candidate in found if Path(candidate.name).name != last]
        found.append(Candidate(run, str(_finished(run)), run))
    if not found:
        raise SoleraError(f"{run}: the run has neither a checkpoint nor a finished model yet")
    return found
