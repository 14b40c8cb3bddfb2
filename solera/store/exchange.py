"""Import and export rollouts and rewards as files of JSON lines or Parquet."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from solera.errors import SoleraError
from solera.folder.files import appearing, writable
from solera.protocols import Codec
from solera.records import PROBE, Reward
from solera.store.database import Place, place_in
from solera.store.ledger import Ledger
from solera.store.lines import LineReader, plain, read_reward, spelled
from solera.store.parquet import is_parquet, read_rows, write_rows
from solera.store.reading import reading
from solera.tasks.keys import HeldOutError

T = TypeVar("T")
COMPLAINTS = 5
"""Maximum number of bad lines that are reported one by one."""


@dataclass
class ReadLines(Generic[T]):
    """The content of a file: the good lines, parsed, and the bad ones as they are, each with its error."""

    good: list[T] = field(default_factory=list)
    bad: list[bytes] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    held_out: int = 0
    """Number of rollouts that were skipped because they answer held-out problems."""


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    rollouts: int
    """New rollouts."""
    known: int
    """Rollouts that were already in the store."""
    rewards: int
    """Rewards that were changed, or added to known rollouts."""
    complaints: list[str]
    held_out: int = 0
    """Rollouts that were skipped because they answer held-out problems."""


def import_rollouts(ledger: Ledger, path: Path, reader: LineReader, skip_bad: Path | None = None) -> Imported:
    """Import all lines or none, in one transaction. With `skip_bad`, import all good lines and write the bad ones to
    that file."""
    check_apart(path, skip_bad)
    lines = read_lines(path, reader, skip_bad is not None)
    new, revised = ledger.add_imported(lines.good)
    set_aside(lines.bad, skip_bad)
    return Imported(new, len(lines.good) - new, revised, lines.complaints, lines.held_out)


def import_rewards(ledger: Ledger, path: Path, skip_bad: Path | None = None) -> Imported:
    """Import rewards by rollout id, in the same way."""

    def read(line: bytes, place: str) -> list[tuple[int, Reward]]:
        id_, reward = read_reward(line, place, partial(usual_part, ledger))
        with ledger.transaction():
            complaint = ledger.unrewardable([id_])
        if complaint:
            raise SoleraError(f"{place}: field 'id': {complaint}")
        return [(id_, reward)]

    check_apart(path, skip_bad)
    lines = read_lines(path, read, skip_bad is not None)
    revised = ledger.revise(lines.good)
    set_aside(lines.bad, skip_bad)
    return Imported(0, 0, revised, lines.complaints)


def usual_part(ledger: Ledger, rollout_id: int) -> str:
    """Return the part for a reward that names none. Refuse if the rollout has other parts, because one of them may be
    meant."""
    parts = ledger.parts(rollout_id)
    if parts and Reward.part not in parts:
        raise SoleraError(
            f"no part is given, but the reward of rollout {rollout_id} has {', '.join(parts)}: name the "
            "part to change or to add"
        )
    return Reward.part


def export_rollouts(place: Place, target: Path, codec: Codec | None = None) -> int:
    """Export every rollout that training may use, with its rewards. The file appears complete or not at all. Returns
    how many.

    Probes are not exported, because they answer held-out problems. With a codec, the text is included.
    """
    with reading(place) as opened, appearing(target) as unfinished:
        rows = (
            plain(rollout, created) | (spelled(rollout, codec) if codec else {})
            for rollout, created in opened.rollouts()
            if rollout.origin != PROBE
        )
        return (write_rows if is_parquet(target) else _write_lines)(unfinished, rows)


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def check_readable(path: Path) -> None:
    """Check that it is a file of lines, or a folder with a store."""
    if path.is_dir():
        place_in(path)
        return
    if path.is_fifo():  # opening and closing a pipe would disconnect its writer
        return
    try:
        path.open("rb").close()
    except OSError as error:
        raise SoleraError(f"{path}: cannot be read: {error.strerror}") from error


def check_data_files(paths: Iterable[str], skip_bad: str | None) -> None:
    """Check that every file can be read, and that bad lines can be written without overwriting one of them."""
    for path in map(Path, paths):
        check_readable(path)
        check_apart(path, Path(skip_bad) if skip_bad is not None else None)
    if skip_bad is not None:
        writable(Path(skip_bad), "store.skip_bad")


def read_lines(path: Path, read: Callable[[bytes, str], list[T]], keep_going: bool) -> ReadLines[T]:
    """Read every line that is not blank, every row of a Parquet file, or every rollout of a store by its id. Answers to
    held-out problems are skipped. The first bad line stops it, unless told to continue."""
    lines = ReadLines[T]()
    for number, line in _numbered(path):
        try:
            lines.good += read(line, f"{path}:{number}")
        except HeldOutError:
            lines.held_out += 1
        except SoleraError as error:
            if not keep_going:
                raise
            lines.bad.append(line)
            lines.complaints.append(str(error))
    if lines.held_out and not lines.good and not lines.bad and not path.is_dir():
        raise HeldOutError(f"{path}: it holds only answers to the task's held-out problems, which are never trained on")
    if not lines.good and not lines.bad and not lines.held_out:
        empty = "the store is empty" if path.is_dir() else "the file is empty: it needs one JSON object per line"
        raise SoleraError(f"{path}{'' if path.is_dir() else ':1'}: {empty}")
    return lines


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    if path.is_dir():
        with reading(place_in(path)) as opened:
            for rollout, created in opened.rollouts():
                if rollout.origin != PROBE:
                    assert rollout.id is not None
                    yield rollout.id, json.dumps(plain(rollout, created), ensure_ascii=False).encode()
        return
    try:
        if is_parquet(path):
            yield from enumerate(read_rows(path), 1)
            return
        with path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise SoleraError(f"{path}: cannot be read: {error.strerror}") from error


def check_apart(path: Path, skip_bad: Path | None) -> None:
    """Refuse to write bad lines over the input file, which would destroy its good lines. Called before anything is
    read."""
    if skip_bad is not None and skip_bad.exists() and path.exists() and skip_bad.samefile(path):
        raise SoleraError(f"{skip_bad}: this is the input file; choose another file for the bad lines")


def set_aside(bad: list[bytes], target: Path | None) -> None:
    """Write the bad lines after the good ones are imported, so that they can be corrected and imported again."""
    if target is not None:
        with appearing(target) as unfinished:
            unfinished.write_bytes(b"".join(line if line.endswith(b"\n") else line + b"\n" for line in bad))
