"""The request of `solera generate`, and the folder it makes: a store and its settings. Does not import torch."""

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
    """What to generate: with which model and settings, how many responses to which prompts, and where to store them."""

    author: Author
    config: Config
    """Resolved. Its `run.root` and `run.name` are those of a new folder."""
    out: Path
    samples: int
    prompts: int | None
    """Number of problems, from the first. `None` takes all."""
    held_out: bool
    """Use the task's held-out problems instead of its training problems."""
    origin: str


@dataclass(frozen=True)
class Written:
    """What was generated."""

    prompts: int
    """Distinct problems that have responses."""
    before: int
    """Responses that existed before, as far as they were asked for."""
    now: int
    further: int
    """Responses to these prompts that were there and not asked for."""
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
    """Refuse a folder that is neither new, nor made by this command, nor a run's."""
    if out.exists() and not (out / CONFIG).is_file():
        raise SoleraError(f"--out {out} already exists and has no store: choose another folder")
    if (out / CONFIG).is_file() and not (out / GENERATED).is_file():
        place_in(out)
