"""Where a model comes from, decided before torch is loaded."""

import difflib
import re
from pathlib import Path

from solera.errors import SoleraError

EMBEDDED = Path(__file__).parent / "embedded"


def find(path: str) -> str:
    """The folder, or the hub name, that `model.path` means."""
    if path == "embedded":
        return str(EMBEDDED)
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SoleraError(f"model {path}: the folder has no config.json, so it is not a Hugging Face model")
        return str(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        hint = "; did you mean embedded?" if difflib.get_close_matches(path, ["embedded"]) else ""
        raise SoleraError(f"model {path!r}: no such folder, and not a hub name of the form owner/name{hint}")
    return path
