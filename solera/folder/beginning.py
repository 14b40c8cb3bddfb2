"""The start of a run: its folder, and a record of what it started with, so that a resume can tell what has changed.
Does not import torch."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from solera.config import Config, dump, fields_of
from solera.config.secrets import MAY_HOLD_SECRETS
from solera.errors import SoleraError
from solera.folder.files import make_folder
from solera.folder.paths import BEGINNING, CONFIG, MODEL, OWN_CODE
from solera.protocols import Task

OWN_PARTS = ("task", "rewards", "objective", "rule")
"""Parts of a run that may be the user's own code."""


@dataclass(frozen=True)
class Beginning:
    """What a run started with, where its config does not tell or may have been edited since."""

    started_in: str
    """The working directory, to which relative paths in the config refer."""
    problems: str
    """Digest of the held-out problems and of the first two training problems. It changes when rows are added or
    removed."""
    rows: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digest of the training rows of each of the task's files. Empty for older runs."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Every field of its config. Empty for older runs."""

    @classmethod
    def of(cls, task: Task, config: Config, rows: Mapping[str, str]) -> "Beginning":
        """Refuses a task whose problems the model cannot read, before the run has a folder."""
        prompts = task.prompt(0), task.prompt(1), *task.held_out(config.evaluate.problems)
        return cls(str(Path.cwd()), digest_of(prompt.key for prompt in prompts), dict(rows), fields_of(config))

    def changed_since(self, begun: "Beginning") -> list[str]:
        """Notes for a run that continues with other settings or data than it started with."""
        said = begun.edited(self.settings)
        files = ", ".join(path for path, digest in self.rows.items() if begun.rows.get(path, digest) != digest)
        if self.problems != begun.problems:
            which = f" ({files} has changed)" if files else ""
            said.append(
                f"the task's problems have changed since the run started{which}: accuracies before and "
                "after cannot be compared"
            )
        elif files:
            said.append(f"{files} has changed since the run started: it continues with different training rows")
        return said

    def edited(self, settings: Mapping[str, str]) -> list[str]:
        """Notes about settings that differ, among those known on both sides."""
        fields = "; ".join(
            f"{name} has another value" if name in MAY_HOLD_SECRETS else f"{name} is {settings[name]}, was {value}"
            for name, value in self.settings.items()
            if settings.get(name, value) != value
        )
        return [f"settings have changed since the run started: {fields}"] if fields else []


def digest_of(keys: Iterable[str]) -> str:
    return blake2b("\0".join(keys).encode(), digest_size=16).hexdigest()


def read_beginning(folder: Path) -> Beginning | None:
    """`None` for a run from before this was recorded."""
    file = folder / BEGINNING
    try:
        beginning = Beginning(**json.loads(file.read_bytes())) if file.exists() else None
        return beginning and dataclasses.replace(
            beginning, rows=dict(beginning.rows), settings=dict(beginning.settings)
        )
    except (ValueError, TypeError) as error:
        raise SoleraError(f"{file}: the file is damaged: restore it, or remove it") from error


def read_own_code(folder: Path) -> list[str]:
    """The parts of a run that are the user's own code."""
    file = folder / OWN_CODE
    try:
        names = json.loads(file.read_bytes()) if file.exists() else []
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(name in OWN_PARTS for name in names):
        raise SoleraError(
            f"{file}: the file is damaged; it must list which of {', '.join(OWN_PARTS)} came from your own "
            "code: restore it"
        )
    return names


def new_folder(config: Config) -> Path:
    """The folder of a new run. Refused if it already exists."""
    assert config.run.name is not None
    folder = Path(config.run.root) / config.run.name
    if os.path.lexists(folder):
        more = " --run.steps N" if (folder / MODEL).exists() else ""
        command = f"solera train --resume {folder}{more}"
        go_on = f"{'extend' if more else 'resume'} it ({command}), " if (folder / CONFIG).is_file() else ""
        raise SoleraError(f"{folder} already exists: {go_on}choose another --run.name, or remove it")
    return folder


def make_run_folder(config: Config, beginning: Beginning, own: Sequence[str]) -> Path:
    """Create the run's folder. `own` names the parts of the run that are the user's own code."""
    files = {CONFIG: dump(config), BEGINNING: json.dumps(dataclasses.asdict(beginning))}
    if own:
        files[OWN_CODE] = json.dumps(list(own))
    return make_folder(new_folder(config), files)
