"""The state of a run, saved so that a killed run continues as if nothing had happened.

A checkpoint is a folder such as `checkpoints/step-000120`: the model as an ordinary Hugging Face folder, `state.json`,
`tensors.pt`, and `digests.json`, which reveals damage. It is written under another name and renamed when complete, so a
half-written one is never read. Torch is imported only when tensors are read or written.
"""

import dataclasses
import errno
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solera.errors import SoleraError, one_line
from solera.folder.account import Account, account_of
from solera.folder.files import UNFINISHED, check_sealed, publish, seal
from solera.folder.paths import DIGESTS, LEARNER, MODEL
from solera.sync.rules import SyncState


class UnreadableCheckpointError(SoleraError):
    """A checkpoint from which a run cannot continue."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{folder}: the checkpoint cannot be read: {why}")
        self.folder = folder


@dataclass(frozen=True)
class RunState:
    """Everything except tensors. There are no random states, because every draw depends only on the seed and its own
    number."""

    lineage: str
    version: int
    sync: SyncState
    position: int
    """Next problem of the task's stream."""
    watermark: int
    """Id of the last rollout in the store when the checkpoint was written."""
    accuracy: float | None
    """Accuracy of this version on held-out problems, if it was evaluated."""
    compute: str | None = None
    """Number format of the run. Unset in older checkpoints."""
    uses: tuple[int, int] | None = None
    """Uses of earlier versions in the store when the checkpoint was written: their number, and the sum of their
    rollouts' ids. Unset in older checkpoints."""
    running: tuple[int, ...] = ()
    """With `collect.mode = "stream"`: problems before `position` whose groups were not in the store yet."""
    ready: tuple[int, ...] = ()
    """With `collect.mode = "stream"`: problems whose groups were in the store and had not been drawn."""
    account: Account | None = None
    """What became of every token. Unset in older checkpoints."""
    engine_error: float | None = None
    """See `Mismatch.engine`."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint that was read."""

    folder: Path
    state: RunState
    tensors: dict[str, Any]
    sealed: bool
    """Whether its files were compared with their digests. Older checkpoints have none."""

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    @property
    def learner(self) -> dict[str, Any] | Path:
        """The learner's state, or the folder in which several ranks wrote it."""
        return self.folder / LEARNER if (self.folder / LEARNER).is_dir() else self.tensors["learner"]


@dataclass(frozen=True)
class Saver:
    """Writes checkpoints to `folder`, and keeps the last few and the best."""

    folder: Path
    every: int
    keep: int
    save_model: Callable[[Path], None]
    save_ranks: Callable[[Path], None] | None = None
    """Lets the ranks of a learner write their state to a folder, if there are several."""

    def due(self, version: int) -> bool:
        return self.every > 0 and version % self.every == 0

    def save(self, state: RunState, tensors: dict[str, Any]) -> None:
        """Write a checkpoint. It appears complete or not at all."""
        final = self.folder / step_name(state.version)
        unfinished = self.folder / f"{UNFINISHED}{final.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)  # no parents: do not recreate a run's folder that was deleted
        unfinished.mkdir()
        self.save_model(unfinished / MODEL)
        if self.save_ranks is not None:
            self.save_ranks(unfinished / LEARNER)
        _save_tensors(tensors, unfinished / "tensors.pt")
        (unfinished / "state.json").write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
        seal(unfinished)
        publish(unfinished, final)
        self._prune()

    def _prune(self) -> None:
        found = checkpoints(self.folder)
        accuracies = {path: _accuracy(path) for path in found}
        best = max(found, key=lambda path: -1.0 if (accuracy := accuracies[path]) is None else accuracy)
        for path in found[: -self.keep]:
            if path != best:
                set_aside(path)
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path)


def checkpoints(folder: Path, after: int = -1) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first; if a step is given, only those after it."""
    found = {step_of(path): path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()}
    return [found[step] for step in sorted(found) if step > after]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def step_name(version: int) -> str:
    return f"step-{version:06d}"


def set_aside(path: Path) -> None:
    """Mark a checkpoint for removal by renaming it. A kill during the removal would otherwise leave half of it to be
    read."""
    discarded = path.with_name(f"{UNFINISHED}{path.name}")
    shutil.rmtree(discarded, ignore_errors=True)
    path.rename(discarded)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read everything except the model, and compare it with its digests."""
    import torch

    try:
        sealed = check_sealed(folder)
        state = read_state(folder)
        if state.uses is not None and not sealed:
            raise ValueError(f"{DIGESTS} is missing")
        tensors = torch.load(folder / "tensors.pt", weights_only=True, map_location="cpu")
        if not isinstance(tensors, dict) or tensors.keys() | {"probe"} != {"learner", "engine", "probe"}:
            raise ValueError("tensors.pt does not hold learner, engine and probe")
    except UnreadableCheckpointError:
        raise
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, SoleraError) as error:
        raise UnreadableCheckpointError(folder, one_line(error)) from error
    return Checkpoint(folder, state, tensors, sealed)


def _save_tensors(tensors: dict[str, Any], path: Path) -> None:
    import torch

    try:
        torch.save(tensors, path)
    except RuntimeError as error:  # torch reports a full disk only as an incomplete write
        raise OSError(errno.EIO, f"cannot be written (is the disk full?): {one_line(error)}", str(path)) from error


def _accuracy(folder: Path) -> float | None:
    """`None` for a checkpoint that cannot be read. A resume reports that; a run in progress need not stop."""
    try:
        return read_state(folder).accuracy
    except UnreadableCheckpointError:
        return None


def read_state(folder: Path) -> RunState:
    try:
        fields = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        uses = None if fields.get("uses") is None else tuple(fields["uses"])
        opened = {name: tuple(fields.get(name, ())) for name in ("running", "ready")}
        account = account_of(fields.get("account"))
        state = RunState(**{**fields, "sync": _sync_state(fields["sync"]), "uses": uses, "account": account, **opened})
        numbers = state.version, state.position, state.watermark, *(() if uses is None else uses or (None,))
        known = (*numbers, *state.running, *state.ready)
        if any(type(number) is not int or number < 0 for number in known) or len(numbers) not in (3, 5):
            raise ValueError("version, position, watermark, uses, running and ready must be whole numbers")
        if state.compute not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"compute in state.json is {state.compute!r}")
        if folder.name != step_name(state.version):
            raise ValueError(f"state.json says version {state.version}")
        return state
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableCheckpointError(folder, one_line(error)) from error


def _sync_state(fields: dict[str, Any]) -> SyncState:
    """Convert lists to tuples, which JSON lacks. Older checkpoints have no readings."""
    readings = tuple((int(batches), float(share)) for batches, share in fields.get("readings", ()))
    return SyncState(**{**fields, "readings": readings})
