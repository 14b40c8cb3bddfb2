"""Read problem rows from a file, a folder with one file per split, or a dataset on the hub.

Only an explicit hub name causes network access. This is the only file that imports the package `datasets`.
"""

import csv
import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from solera import hub
from solera.errors import SoleraError, one_line

SPLITS = ("train", "test")
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
"""OWNER/NAME, or OWNER/NAME:SUBSET."""
TABLES = {".parquet": "parquet", ".csv": "csv"}
"""File types that `datasets` reads, besides JSON lines, which Solera reads itself."""


Lines = str | list[tuple[str, bytes]]
"""The path of a file with JSON lines, or lines of JSON with their places."""


def find_splits(path: str) -> dict[str, Lines]:
    """Return the available splits by name. A single file is `train`."""
    place = Path(path).expanduser()
    if os.path.isdir(place):  # unlike Path's, false for a name that is too long or contains NUL
        files = {split: file for split in SPLITS for file in _files(place, split)}
        if not files:
            raise SoleraError(f"{path}: the folder has neither train.jsonl nor test.jsonl")
        return {split: _lines(str(file)) for split, file in files.items()}
    if os.path.exists(place) or not HUB_NAME.fullmatch(path) or os.path.isdir(place.parent):
        return {"train": _lines(path)}
    return _fetch(path)


def one_split(path: str, wanted: str) -> Lines:
    """Return the wanted split, or the only one."""
    splits = find_splits(path)
    if wanted not in splits and len(splits) > 1:
        raise SoleraError(f"{path}: there is no split {wanted}; it has {', '.join(splits)}")
    return splits.get(wanted) or next(iter(splits.values()))


def _files(folder: Path, split: str) -> list[Path]:
    return [file for end in (".jsonl", *TABLES) if (file := folder / f"{split}{end}").is_file()][:1]


def _lines(file: str) -> Lines:
    kind = TABLES.get(Path(file).suffix)
    if kind is None:
        return file
    options = _all_text(file) if kind == "csv" else {}
    return _numbered(_load(kind, file, data_files=file, **options)["train"], file)


def _all_text(file: str) -> dict[str, Any]:
    """Options to load a CSV file without a guess at the type of its columns: 007 and 3 stay as they are. Empty cells
    are null."""
    datasets = _datasets(file)
    try:
        with open(Path(file).expanduser(), encoding="utf-8-sig", errors="replace", newline="") as lines:
            columns = next(csv.reader(lines), [])
    except (OSError, csv.Error) as error:
        raise SoleraError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from error
    text = datasets.Features({column: datasets.Value("string") for column in columns})
    return {"features": text, "keep_default_na": False, "na_values": [""]}


@lru_cache(maxsize=4)
def _fetch(path: str) -> dict[str, Lines]:
    match = HUB_NAME.fullmatch(path)
    assert match is not None
    try:
        hub.call()
        splits = _load(match[1], path, name=match[2])
    except ConnectionError:
        splits = _load_copy(match[1], path, name=match[2])
    return {split: _numbered(rows, f"{path}:{split}") for split, rows in splits.items()}


def _numbered(table: Any, place: str) -> Lines:
    return [(f"{place}:{number}", json.dumps(row, default=str).encode()) for number, row in enumerate(table, 1)]


def _load_copy(kind: str, shown: str, **options: Any) -> Any:
    """Load from the cache if the hub does not answer."""
    settings = _datasets(shown).config
    before, settings.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE, True
    try:
        return _load(kind, shown, **options)
    except SoleraError as error:
        if not isinstance(error.__cause__, ConnectionError):
            raise
        advice = "give a file or a folder, or load it once with network access"
        raise SoleraError(f"{shown}: {hub.absent()}: {advice}") from error
    finally:
        settings.HF_HUB_OFFLINE = before


def _load(kind: str, shown: str, **options: Any) -> Any:
    datasets = _datasets(shown)
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(kind, **options)
    except Exception as error:  # the network, the cache or the dataset's script may raise anything
        raise SoleraError(f"{shown}: cannot be loaded: {type(error).__name__}: {one_line(error)}") from error


def _datasets(shown: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise SoleraError(f"{shown}: needs the package datasets: pip install 'solera[datasets]'") from None
    return datasets
