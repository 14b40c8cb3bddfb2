"""Find where a model comes from, before torch is loaded."""

import difflib
import json
import os
import re
import socket
from pathlib import Path

from solera import hub
from solera.config import EMBEDDED_MODELS
from solera.errors import SoleraError, one_line
from solera.folder.paths import MODEL
from solera.hub import Snapshot

EMBEDDED = Path(__file__).parent / "embedded"

ADAPTER = "adapter_config.json"
"""The file that names the base model of a folder of adapters."""


def base_of(source: str) -> str | None:
    """Return the base model of a folder of adapters, or `None` if the folder holds a complete model."""
    name = base_name(source)
    return None if name is None else obtain(name)


def base_name(source: str) -> str | None:
    """The same as the folder names it: a folder or a hub name."""
    file = Path(source) / ADAPTER
    if not file.is_file():
        return None
    try:
        return find(json.loads(file.read_bytes())["base_model_name_or_path"])
    except (ValueError, TypeError, KeyError) as error:
        raise SoleraError(f"{file}: does not name its base model (base_model_name_or_path)") from error


def find(path: str) -> str:
    """Return the folder or hub name that `model.path` means."""
    if path in EMBEDDED_MODELS:
        return str(EMBEDDED.with_name(path))
    folder = Path(path).expanduser()
    if path and os.path.isdir(folder):  # unlike Path's, false for a name that is too long or contains NUL
        if not _is_model(folder):
            hint = f"; did you mean {folder / MODEL}?" if _is_model(folder / MODEL) else ""
            raise SoleraError(f"model {path}: the folder has no config.json, so it is not a Hugging Face model{hint}")
        return str(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        close = difflib.get_close_matches(path, EMBEDDED_MODELS)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SoleraError(f"model {path[:200]!r}: no such folder, and not a hub name of the form owner/name{hint}")
    if os.path.isdir(folder.parent):
        raise SoleraError(f"model {path}: there is no such folder in {folder.parent}")
    return path


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / ADAPTER).is_file()


def snapshot_of(path: str) -> Snapshot | None:
    """The files in the hub's cache that hold the weights of a model that was loaded. `None` if a folder holds them."""
    source = find(path)
    name = base_name(source) or source
    return None if os.path.isdir(name) else hub.snapshot_of(name)


def places(path: str, snapshot: Snapshot | None = None) -> tuple[str, str | None]:
    """Return where to load from, and the base model if that is a folder of adapters. A snapshot holds the weights."""
    if snapshot is None:
        source = obtain(path)
        return source, base_of(source)
    weights = _here(snapshot)
    return (find(path), weights) if os.path.isdir(find(path)) else (weights, None)


def _here(snapshot: Snapshot) -> str:
    try:
        return snapshot.here()
    except Exception as error:  # the hub's library has many kinds
        raise SoleraError(
            f"model {snapshot.model} on the machine {socket.gethostname()}: {one_line(error)}: give a folder that "
            f"every machine has, or download it there: hf download {snapshot.model} --revision {snapshot.revision}"
        ) from error


def obtain(path: str) -> str:
    """Return where to load from: the result of `find`, or the cached copy if the hub does not answer."""
    source = find(path)
    if os.path.isdir(source):
        return source
    try:
        hub.call()
        return source
    except ConnectionError as error:
        if copy := hub.copy_of(source):
            return copy
        raise SoleraError(
            f"model {path}: {error}: give a folder, or download it first: hf download {source}"
        ) from error
