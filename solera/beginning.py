"""How a run begins: its folder, and what it began with, so that a resume can tell what has changed. No torch."""

import dataclasses
import errno
import json
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from solera.config import Config, dump, fields_of, new_folder, task_parts
from solera.config.secrets import MAY_HOLD_SECRETS
from solera.errors import SoleraError
from solera.evaluate.candidates import OWN_CODE
from solera.files import UNFINISHED, publish
from solera.protocols import Task
from solera.store.database import place_of, refuse_taken
from solera.tasks.jsonl import read_split

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
        said = begun.edited(self.settings)
        files = ", ".join(path for path, digest in self.rows.items() if begun.rows.get(path, digest) != digest)
        if self.problems != begun.problems:
            which = f" ({files} has changed)" if files else ""
            said.append(
                f"the task's problems are not those that the run began with{which}: its accuracies do not compare"
            )
        elif files:
            said.append(f"{files} has changed since the run began: it goes on with other rows to train on")
        return said

    def edited(self, settings: Mapping[str, str]) -> list[str]:
        """What is to be said where these are other settings, of those that are known of both."""
        fields = "; ".join(
            f"{name} is another" if name in MAY_HOLD_SECRETS else f"{name} is {settings[name]}, was {value}"
            for name, value in self.settings.items()
            if settings.get(name, value) != value
        )
        return [f"config.toml has changed since the run began: {fields}"] if fields else []

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


def make_folder(config: Config, beginning: Beginning, own: Sequence[str]) -> Path:
    """A new folder for the run, with the resolved config in it from the first moment; `own` names the parts of the run
    that are its user's code."""
    folder = new_folder(config)
    refuse_taken(place_of(config.store.url, folder))
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir(parents=True)
        (unfinished / "config.toml").write_text(dump(config), encoding="utf-8")
        beginning.write(unfinished)
        if own:
            (unfinished / OWN_CODE).write_text(json.dumps(list(own)), encoding="utf-8")
        publish(unfinished, folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        said = f"the run's folder cannot be made: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise OSError(error.errno, said, str(folder)) from error
        raise SoleraError(f"{folder}: {said}") from error
    return folder
