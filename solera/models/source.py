"""Where a model comes from, decided before torch is loaded."""

import difflib
import os
import re
from pathlib import Path

from solera.errors import SoleraError

EMBEDDED = Path(__file__).parent / "embedded"


def find(path: str) -> str:
    """The folder, or the hub name, that `model.path` means."""
    if path == "embedded":
        return str(EMBEDDED)
    folder = Path(path).expanduser()
    if path and os.path.isdir(folder):  # unlike Path's, false for a name too long or with a NUL
        if not (folder / "config.json").is_file():
            hint = f"; did you mean {folder / 'model'}?" if (folder / "model" / "config.json").is_file() else ""
            raise SoleraError(f"model {path}: the folder has no config.json, so it is not a Hugging Face model{hint}")
        return str(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        hint = "; did you mean embedded?" if difflib.get_close_matches(path, ["embedded"]) else ""
        raise SoleraError(f"model {path[:200]!r}: no such folder, and not a hub name of the form owner/name{hint}")
    if os.path.isdir(folder.parent):
        raise SoleraError(f"model {path}: there is no such folder in {folder.parent}")
    return path
