"""What `solera generate` is asked to do, and the folder it makes: a store with settings, where nothing is trained."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solera.config import Config
from solera.errors import SoleraError
from solera.evaluate.candidates import Author
from solera.folder.paths import CONFIG, GENERATED
from solera.store.database import place_in


@dataclass(frozen=True)
class Order:
    """What is to be written: by whom, with which settings, how many responses to which prompts, and where they go."""

    author: Author
    config: Config
    """Resolved. Its `run.root` and `run.name` are those of a new folder."""
    out: Path
    samples: int
    prompts: int | None
    """The first so many problems; `None`: all that there are."""
    held_out: bool
    """The task's held-out problems in place of those that it trains on."""
    origin: str


@dataclass(frozen=True)
class Written:
    """What has come of an order."""

    prompts: int
    """Different problems, answered now or before."""
    before: int
    """Responses that were there already."""
    now: int
    finished: bool


def read_generated(folder: Path) -> dict[str, Any]:
    file = folder / GENERATED
    try:
        marks = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SoleraError(f"{file}: the file is damaged: {error}") from error
    if not isinstance(marks, dict):
        raise SoleraError(f"{file}: the file is damaged: it has no JSON object")
    return marks


def check_out(out: Path) -> None:
    """A new place, a folder of this kind to go on with, or a run's."""
    if out.exists() and not (out / CONFIG).is_file():
        raise SoleraError(f"--out {out} already exists and has no store: choose another folder")
    if (out / CONFIG).is_file() and not (out / GENERATED).is_file():
        place_in(out)
