"""Decides whether, from where and with which settings a run can be resumed. Imports torch only for tensors."""

import dataclasses
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from solera import config as configuration
from solera.config import SAFE, Config, alike
from solera.errors import SoleraError
from solera.folder.beginning import read_beginning, read_own_code
from solera.folder.checkpoint import (
    Checkpoint,
    UnreadableCheckpointError,
    checkpoints,
    read_checkpoint,
    set_aside,
    step_name,
    step_of,
)
from solera.folder.files import write_whole
from solera.folder.paths import CHECKPOINTS, CONFIG, GENERATED, METRICS, MODEL
from solera.models.source import find
from solera.objectives.table import resolve_config
from solera.report.sinks import missing_rows, read_metrics
from solera.store.database import Place
from solera.store.exchange import check_data_files
from solera.store.ledger import Ledger
from solera.store.verifying import Needs, refuse_other
from solera.tasks.rewards import check_data, check_own


def resumable(
    folder: Path, own: Sequence[str] = (), changes: Mapping[str, Any] = MappingProxyType({}), start: int | None = None
) -> Config:
    """The resolved config of the run in the folder, with `changes` such as `{"run.steps": 500}` applied. `own` names
    the parts that the user passed as code; `start` is the step of the checkpoint to resume from."""
    if (folder / GENERATED).is_file():
        raise SoleraError(
            f"{folder}: this holds generated responses, not a run; to train on them: "
            f"solera train --store.data {folder} --draw.policy offline"
        )
    before, names = settings_of(folder), read_own_code(folder)
    config = _changed(folder, before, changes)
    _refuse_finished(folder, before, config)
    if names != list(own):
        raise SoleraError(
            f"{folder}: the run was started with your own code for {', '.join(names) or 'nothing'}: resume "
            f"it with {_call(folder, names)}"
        )
    if start and not (folder / CHECKPOINTS / step_name(start)).is_dir():
        known = ", ".join(path.name for path in checkpoints(folder / CHECKPOINTS)) or "no checkpoint"
        raise SoleraError(f"{folder}: no checkpoint of step {start}; it has {known} (0 restarts the run)")
    _check_files(config, folder)
    return config


def settings_of(folder: Path) -> Config:
    """The resolved config in a run's folder."""
    file = folder / CONFIG
    if not file.is_file():
        raise SoleraError(f"{folder}: no config.toml, so there is no run to resume here")
    config = configuration.load_resolved(file)
    if config.run.name is None:
        raise SoleraError(f"{file}: run.name is unset, so this is not the config of a run")
    try:
        return resolve_config(config)
    except SoleraError as error:
        raise configuration.located(error, file, config) from error


def _changed(folder: Path, config: Config, changes: Mapping[str, Any]) -> Config:
    """Apply these settings to the config. Refuse settings that a resume must not change."""
    unknown = [name for name in changes if name not in configuration.fields_of(config)]
    unsafe = [name for name in changes if name not in SAFE and name not in unknown]
    if unknown:
        raise SoleraError(f"{unknown[0]}: no such setting{alike(unknown[0], SAFE, 1)}")
    if unsafe:
        raise SoleraError(
            f"a resumed run cannot change {', '.join(unsafe)}, because that would make it a different run "
            f"(solera train --help lists what can change); to change it anyway, edit {folder / CONFIG}, and "
            "the run's report will mention it"
        )
    for name, value in changes.items():
        section, _, key = name.partition(".")
        config = configuration.override(config, section, **{key: value})
    return resolve_config(config)


def _refuse_finished(folder: Path, before: Config, config: Config) -> None:
    """Refuse a finished run, unless it gets more steps and has a checkpoint."""
    if not (folder / MODEL).exists():
        return
    steps = _finished_at(folder, before)
    if config.run.steps <= steps:
        raise SoleraError(
            f"{folder}: the run is finished; its model is in {folder / MODEL}; to extend it, give more than its "
            f"{steps} steps: solera train --resume {folder} --run.steps N"
        )
    if not checkpoints(folder / CHECKPOINTS):
        raise SoleraError(
            f"{folder}: the run is finished and has no checkpoint, so it cannot be extended; to train its "
            f"model further in a new run: solera train --model {folder / MODEL}"
        )


def _finished_at(folder: Path, config: Config) -> int:
    """The step of a finished run's model: the last one logged. config.toml may have been edited since."""
    metrics = folder / METRICS
    rows = read_metrics(metrics) if metrics.exists() else []
    return max((int(row["step"]) for row in rows), default=config.run.steps)


def changes_between(before: Config, after: Config) -> dict[str, Any]:
    """Names and values of the settings that differ."""
    return {
        f"{section.name}.{key.name}": getattr(getattr(after, section.name), key.name)
        for section in dataclasses.fields(before)
        for key in dataclasses.fields(getattr(before, section.name))
        if getattr(getattr(after, section.name), key.name) != getattr(getattr(before, section.name), key.name)
    }


def how_to_go_on(folder: Path, own: Sequence[str], start: int | None = None) -> str:
    if own:
        return _call(folder, own, start)
    return shlex.join(["solera", "train", "--resume", str(folder), *(() if start is None else ("--from", str(start)))])


def _call(folder: Path, own: Sequence[str], start: int | None = None) -> str:
    given = [f"{name}=..." for name in own] + ([] if start is None else [f"start={start}"])
    return f"solera.resume({', '.join([repr(str(folder)), *given])})"


def _check_files(config: Config, folder: Path) -> None:
    """Refuse missing files. If the run was started in another folder, name it."""
    beginning = read_beginning(folder)
    try:
        check_own(config, check_data(config))
        check_data_files(config.store.data, config.store.skip_bad)
        if not any((folder / CHECKPOINTS).glob("step-*")):
            find(config.model.path)
    except SoleraError as error:
        if beginning is None or beginning.started_in == str(Path.cwd()):
            raise
        raise SoleraError(f"{error}; the run was started in {beginning.started_in}: run the command there") from error


def checkpoint_of(folder: Path, config: Config, start: int | None, say: Callable[[str], None]) -> Checkpoint | None:
    """The run's newest checkpoint, or the one of step `start`. `None` means that the run begins again."""
    found = [path for path in checkpoints(folder / CHECKPOINTS) if start in (None, step_of(path))]
    if not found:
        return None
    checkpoint = read_checkpoint(found[-1])
    if checkpoint.state.version > config.run.steps:
        raise SoleraError(
            f"{checkpoint.folder}: this checkpoint is of step {checkpoint.state.version}, but run.steps is "
            f"{config.run.steps}: set it to {checkpoint.state.version} or more"
        )
    if not checkpoint.sealed:
        say(
            f"{checkpoint.folder} was written by a version of Solera without checksums: it cannot be checked for damage"
        )
    return checkpoint


@contextmanager
def offering(folder: Path, own: Sequence[str]) -> Iterator[None]:
    """If a checkpoint cannot be read, print how to resume from the one before it."""
    try:
        yield
    except UnreadableCheckpointError as error:
        older = [path for path in checkpoints(folder / CHECKPOINTS) if step_of(path) < step_of(error.folder)]
        where = (
            f"from {older[-1].name}, the one before it"
            if older
            else "from the beginning, because there is no other checkpoint"
        )
        command = how_to_go_on(folder, own, step_of(older[-1]) if older else 0)
        raise SoleraError(f"{error}; to resume {where}: {command}") from error


def say_if_lost(store: Place, folder: Path, say: Callable[[str], None]) -> None:
    """Print a note if the store of a started run is missing. Without a checkpoint, it can begin again in a new one."""
    if isinstance(store, Path) and not store.exists() and (folder / METRICS).exists():
        say(f"{store} is missing: rollouts that were imported into it, and rewards that came later, are lost")


def take_back(
    folder: Path, config: Config, store: Ledger, checkpoint: Checkpoint | None, say: Callable[[str], None]
) -> None:
    """Check that the store matches the checkpoint, then undo everything after it. If the process is killed between
    any two of these steps, the run can still be resumed."""
    state = checkpoint.state if checkpoint else None
    watermark, version = (state.watermark, state.version) if state else (0, 0)
    refuse_other(store, Needs(version, watermark, state.uses if state else None))
    if sentence := missing_rows(folder / METRICS, version):
        say(sentence)
    _keep_settings(folder, config, say)
    for path in checkpoints(folder / CHECKPOINTS, after=version):
        set_aside(path)
        say(f"removed {path.name}, which is after step {version}")
    store.rewind(watermark, version, state.lineage if state else None)


def _keep_settings(folder: Path, config: Config, say: Callable[[str], None]) -> None:
    """Rename the model of a finished run, then write the new settings. The order matters: a kill in between must not
    leave a finished run that claims more steps than it made."""
    before = settings_of(folder)
    if (folder / MODEL).exists():
        steps = _finished_at(folder, before)
        kept = folder / f"model-{step_name(steps)}"
        shutil.rmtree(kept, ignore_errors=True)
        (folder / MODEL).rename(kept)
        say(f"the model after {steps} steps is now in {kept}")
    if changes_between(before, config):
        write_whole(folder / CONFIG, configuration.dump(config))
    if before.run.steps != config.run.steps and config.learn.decay != "constant":
        say(
            f"learn.decay is {config.learn.decay}: the learning rate now falls to zero at step "
            f"{config.run.steps} instead of {before.run.steps}, so it changes immediately"
        )
