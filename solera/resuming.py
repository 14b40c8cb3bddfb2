"""Whether a run can be gone on with, and how: decided before torch is loaded."""

from collections.abc import Sequence
from pathlib import Path

from solera import config as configuration
from solera.beginning import read_beginning
from solera.config import Config
from solera.errors import SoleraError
from solera.evaluate.candidates import read_own_code
from solera.generated import GENERATED
from solera.models.source import find
from solera.objectives.table import resolve_config
from solera.store.exchange import check_data_files
from solera.tasks.rewards import check_data, check_own


def resumable(folder: Path, own: Sequence[str] = ()) -> Config:
    """The resolved config of the run in the folder; `own` names the parts of one's own code that are at hand."""
    if not (folder / "config.toml").is_file():
        raise SoleraError(f"{folder}: no config.toml, so there is no run to resume here")
    if (folder / GENERATED).is_file():
        raise SoleraError(
            f"{folder}: this holds generated responses, not a run; to train on them: "
            f"solera train --store.data {folder} --draw.policy offline"
        )
    if (folder / "model").exists():
        raise SoleraError(f"{folder}: the run is finished; its model is in {folder / 'model'}")
    config, names = _settings_of(folder), read_own_code(folder)
    if names != list(own):
        raise SoleraError(
            f"{folder}: the run was started with code of its own for {', '.join(names) or 'nothing'}: "
            f"go on with {_call(folder, names)}"
        )
    _check_files(config, folder)
    return config


def how_to_go_on(folder: Path, own: Sequence[str]) -> str:
    return _call(folder, own) if own else f"solera train --resume {folder}"


def _call(folder: Path, own: Sequence[str]) -> str:
    return f"solera.resume({', '.join([repr(str(folder)), *(f'{name}=...' for name in own)])})"


def _settings_of(folder: Path) -> Config:
    """The resolved config that a run's folder holds."""
    file = folder / "config.toml"
    config = configuration.load_resolved(file)
    if config.run.name is None:
        raise SoleraError(f"{file}: run.name is unset, so it is not the config that a run has written")
    try:
        return resolve_config(config)
    except SoleraError as error:
        raise configuration.located(error, file, config) from error


def _check_files(config: Config, folder: Path) -> None:
    """Refuse what is not found, and say where the run's paths begin if that is not here."""
    beginning = read_beginning(folder)
    try:
        check_own(config, check_data(config))
        check_data_files(config.store.data, config.store.skip_bad)
        if not any((folder / "checkpoints").glob("step-*")):
            find(config.model.path)
    except SoleraError as error:
        if beginning is None or beginning.started_in == str(Path.cwd()):
            raise
        raise SoleraError(f"{error}; the run was started in {beginning.started_in}: go on from there") from error
