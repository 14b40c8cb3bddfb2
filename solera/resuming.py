"""Whether a run can be gone on with, and how: decided before torch is loaded."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from solera import config as configuration
from solera.config import Config, fields_of, task_parts
from solera.errors import SoleraError
from solera.evaluate.candidates import read_own_code
from solera.models.source import find
from solera.objectives.table import resolve_config
from solera.protocols import Task
from solera.store.exchange import check_readable
from solera.tasks.jsonl import read_split
from solera.tasks.rewards import check_data, check_own

BEGINNING = "beginning.json"


@dataclass(frozen=True)
class Beginning:
    """What a run began with: what its config does not tell, and what may be edited there since."""

    started_in: str
    """The folder in which its config's relative paths begin."""
    problems: str
    """Digest of the held-out problems and of the first two to train on, which are others when rows come or go."""
    rows: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digest of the rows to train on of each of the task's files; of older runs it is not known."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Every field of its config; of older runs not known."""

    @classmethod
    def of(cls, task: Task, config: Config, own: bool) -> "Beginning":
        """A task whose problems the model cannot be shown is refused here, before the run has a folder; `own`: the task
        is not the config's."""
        prompts = task.prompt(0), task.prompt(1), *task.held_out(config.evaluate.problems)
        parts = () if own else task_parts(config.task).values()
        rows = {
            part.path: digest_of(row.key for row in read_split(part, frozenset())[0])
            for part in parts if part.prompt is not None and part.path is not None
        }  # fmt: skip
        return cls(str(Path.cwd()), digest_of(prompt.key for prompt in prompts), rows, fields_of(config))

    def changed_since(self, begun: "Beginning") -> list[str]:
        """What is to be said of a run that goes on with other settings or data than it began with."""
        fields = [
            f"{name} is {value}, was {begun.settings[name]}"
            for name, value in self.settings.items()
            if begun.settings.get(name, value) != value
        ]
        said = [f"config.toml has changed since the run began: {'; '.join(fields)}"] if fields else []
        files = ", ".join(path for path, digest in self.rows.items() if begun.rows.get(path, digest) != digest)
        if self.problems != begun.problems:
            which = f" ({files} has changed)" if files else ""
            said.append(
                f"the task's problems are not those that the run began with{which}: its accuracies do not compare"
            )
        elif files:
            said.append(f"{files} has changed since the run began: it goes on with other rows to train on")
        return said

    def write(self, folder: Path) -> None:
        (folder / BEGINNING).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def digest_of(keys: Iterable[str]) -> str:
    return blake2b("\0".join(keys).encode(), digest_size=16).hexdigest()


def read_beginning(folder: Path) -> Beginning | None:
    """`None` for a run from before it was kept."""
    file = folder / BEGINNING
    try:
        beginning = Beginning(**json.loads(file.read_bytes())) if file.exists() else None
        return beginning and dataclasses.replace(
            beginning, rows=dict(beginning.rows), settings=dict(beginning.settings)
        )
    except (ValueError, TypeError) as error:
        raise SoleraError(f"{file}: the file is damaged: put it back, or remove it") from error


def resumable(folder: Path, own: Sequence[str] = ()) -> Config:
    """The resolved config of the run in the folder; `own` names the parts of one's own code that are at hand."""
    if not (folder / "config.toml").is_file():
        raise SoleraError(f"{folder}: no config.toml, so there is no run to resume here")
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
    config = configuration.load(file)
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
        for path in config.store.data:
            check_readable(Path(path))
        if not any((folder / "checkpoints").glob("step-*")):
            find(config.model.path)
    except SoleraError as error:
        if beginning is None or beginning.started_in == str(Path.cwd()):
            raise
        raise SoleraError(f"{error}; the run was started in {beginning.started_in}: go on from there") from error
