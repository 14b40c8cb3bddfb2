"""Where a run stands, written so that a killed run goes on as if nothing had happened.

A checkpoint is a folder `checkpoints/step-000120`: the model as an ordinary Hugging Face folder, `state.json` and
`tensors.pt`. It is written under another name and renamed when complete, so a half-written one is never read.
"""

import dataclasses
import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from solera.errors import SoleraError, one_line
from solera.sync.rules import SyncState

UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class RunState:
    """What is not in a tensor. There are no random states: every draw depends on the seed and its own number."""

    lineage: str
    version: int
    sync: SyncState
    position: int
    """Next problem of the task's stream."""
    watermark: int
    """Last rollout in the store when this was written."""
    accuracy: float | None
    """This version's accuracy on held-out problems, where it was evaluated."""
    compute: str | None = None
    """The run's arithmetic; unset in a checkpoint from before it was kept."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint that was read back."""

    model: Path
    state: RunState
    tensors: dict[str, Any]


@dataclass(frozen=True)
class Saver:
    """Writes checkpoints below `folder`, keeps the last few and the best."""

    folder: Path
    every: int
    keep: int
    save_model: Callable[[Path], None]

    def due(self, version: int) -> bool:
        return self.every > 0 and version % self.every == 0

    def save(self, state: RunState, tensors: dict[str, Any]) -> None:
        """Write a checkpoint; it appears whole or not at all."""
        final = self.folder / _name(state.version)
        unfinished = self.folder / f"{UNFINISHED}{final.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.save_model(unfinished / "model")
        _save_tensors(tensors, unfinished / "tensors.pt")
        (unfinished / "state.json").write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
        publish(unfinished, final)
        self._prune()

    def _prune(self) -> None:
        found = sorted(self.folder.glob("step-*"))
        accuracies = {path: _state(path).accuracy for path in found}
        best = max(found, key=lambda path: -1.0 if (accuracy := accuracies[path]) is None else accuracy)
        for path in found[: -self.keep]:
            if path != best:
                path.rename(self.folder / f"{UNFINISHED}{path.name}")  # or a kill would leave half of it to be read
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path)


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint below `folder`, if there is one."""
    found = sorted(folder.glob("step-*"))
    if not found:
        return None
    try:
        tensors = torch.load(found[-1] / "tensors.pt", weights_only=True, map_location="cpu")
        if not isinstance(tensors, dict) or tensors.keys() | {"probe"} != {"learner", "engine", "probe"}:
            raise ValueError("tensors.pt does not hold learner, engine and probe")
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise unreadable(found[-1], one_line(error)) from error
    return Checkpoint(found[-1] / "model", _state(found[-1]), tensors)


def unreadable(folder: Path, why: str) -> SoleraError:
    """With how to go on without it. Nothing is to be removed: a base model or a package may be what is missing."""
    older = sorted(path.name for path in folder.parent.glob("step-*") if path.name < folder.name)
    onwards = f"go on from {older[-1]}" if older else "begin the run anew"
    return SoleraError(f"{folder}: the checkpoint cannot be read: {why}; if it is damaged, move it away to {onwards}")


def _save_tensors(tensors: dict[str, Any], path: Path) -> None:
    try:
        torch.save(tensors, path)
    except RuntimeError as error:  # torch knows of a full disk only that less was written than it gave
        raise OSError(errno.EIO, f"cannot be written, as on a full disk: {one_line(error)}", str(path)) from error


def publish(unfinished: Path, final: Path) -> None:
    """Give a finished folder its name, once all of it is on the disk."""
    for path in (*unfinished.rglob("*"), unfinished):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    unfinished.rename(final)


def _name(version: int) -> str:
    return f"step-{version:06d}"


def _state(folder: Path) -> RunState:
    try:
        fields = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        state = RunState(**{**fields, "sync": _sync_state(fields["sync"])})
        numbers = state.version, state.position, state.watermark
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("version, position and watermark in state.json must be whole numbers")
        if state.compute not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"compute in state.json is {state.compute!r}")
        if folder.name != _name(state.version):
            raise ValueError(f"state.json says version {state.version}")
        return state
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise unreadable(folder, one_line(error)) from error


def _sync_state(fields: dict[str, Any]) -> SyncState:
    """JSON has no tuples, and a checkpoint from before the readings were kept has none of them."""
    readings = tuple((int(batches), float(share)) for batches, share in fields.get("readings", ()))
    return SyncState(**{**fields, "readings": readings})
