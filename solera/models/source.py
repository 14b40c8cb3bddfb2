"""Where a model comes from, decided before torch is loaded."""

import difflib
import json
import os
import re
from pathlib import Path

from solera import hub
from solera.errors import SoleraError
from solera.folder.paths import MODEL

EMBEDDED = Path(__file__).parent / "embedded"


ADAPTER = "adapter_config.json"
"""The file that says which model a folder of adapters belongs to."""


def base_of(source: str) -> str | None:
    """The model that a folder of adapters is for; `None` for a model of its own."""
    file = Path(source) / ADAPTER
    if not file.is_file():
        return None
    try:
        return obtain(json.loads(file.read_bytes())["base_model_name_or_path"])
    except (ValueError, TypeError, KeyError) as error:
        raise SoleraError(f"{file}: does not name its base model (base_model_name_or_path)") from error


def find(path: str) -> str:
    """The folder, or the hub name, that `model.path` means."""
    if path == "embedded":
        return str(EMBEDDED)
    folder = Path(path).expanduser()
    if path and os.path.isdir(folder):  # unlike Path's, false for a name too long or with a NUL
        if not _is_model(folder):
            hint = f"; did you mean {folder / MODEL}?" if _is_model(folder / MODEL) else ""
            raise SoleraError(f"model {path}: the folder has no config.json, so it is not a Hugging Face model{hint}")
        return str(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        hint = "; did you mean embedded?" if difflib.get_close_matches(path, ["embedded"]) else ""
        raise SoleraError(f"model {path[:200]!r}: no such folder, and not a hub name of the form owner/name{hint}")
    if os.path.isdir(folder.parent):
        raise SoleraError(f"model {path}: there is no such folder in {folder.parent}")
    return path


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / ADAPTER).is_file()


def obtain(path: str) -> str:
    """Where to load from: what `find` finds, or the copy of a hub's model where the hub does not answer."""
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
            f"model {path}: {error}: give a folder, or fetch it where there is a network: hf download {source}"
        ) from error
