"""Files and folders that appear complete or not at all, can be checked for damage, and can be locked by one process."""

import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from solera.errors import SoleraError
from solera.folder.paths import DIGESTS, LOCK

UNFINISHED = ".unfinished-"
"""Prefix of files and folders that are incomplete or no longer wanted."""
LEFT = 86_400.0
"""Seconds without a change after which an unfinished file counts as left by a writer that was killed."""
PIECE = 1 << 24
"""Bytes that are hashed at once. Pieces are hashed in parallel, because a checkpoint has gigabytes."""


class DamagedError(SoleraError):
    """A file that is not what was written."""


def beside(target: Path) -> Path:
    """Temporary name of a file until it is complete. No two writers get the same name."""
    return target.with_name(f"{UNFINISHED}{uuid.uuid4().hex[:8]}-{target.name}")


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A file to write to, which replaces the target when it is complete. If the disk is full, the error names the
    target and nothing is left behind. A symbolic link stays, and so does a device or a pipe: it gets the content."""
    stream = _is_stream(target)
    final = Path(tempfile.gettempdir()) / target.name if stream else _led_to(target)
    unfinished = beside(final)
    _remove_leftovers(final)
    try:
        yield unfinished
        if stream:
            with unfinished.open("rb") as made, target.open("wb") as file:
                shutil.copyfileobj(made, file)
        else:
            unfinished.replace(final)
    except OSError as error:
        if error.filename not in (None, str(unfinished)):  # the fault is in a file that was read
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _is_stream(target: Path) -> bool:
    """Whether it is a device or a pipe, which nothing may replace."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _led_to(target: Path) -> Path:
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _remove_leftovers(target: Path) -> None:
    """Remove what writers of this file left when they were killed. One that is at work has changed its file since."""
    for path in target.parent.glob(f"{UNFINISHED}{'?' * 8}-{glob.escape(target.name)}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFT:
                path.unlink()


def writable(target: Path, named: str) -> Path:
    """Check that a file can be written before doing the work. `named` is the user's name for it."""
    try:
        if target.is_dir():
            raise SoleraError(f"{named}: this is a folder; give a file")
        if not _is_stream(target):
            trial = beside(_led_to(target))
            trial.touch()
            trial.unlink()
        elif not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SoleraError(f"{named}: cannot write a file to {target.parent}: {error.strerror}") from error
    return target


def write_whole(target: Path, text: str) -> Path:
    with appearing(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return target


def publish(unfinished: Path, final: Path) -> None:
    """Rename a finished folder to its final name, once all of it is on the disk."""
    for path in (*unfinished.rglob("*"), unfinished):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    unfinished.rename(final)


def make_folder(folder: Path, files: Mapping[str, str]) -> Path:
    """Create a folder that contains these files from the first moment, so that it can always be continued."""
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir(parents=True)
        for name, text in files.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        publish(unfinished, folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        said = f"the folder cannot be created: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise OSError(error.errno, said, str(folder)) from error
        raise SoleraError(f"{folder}: {said}") from error
    return folder


def seal(folder: Path) -> None:
    """Record the size and digest of every file in the folder. For a sealed folder inside it, record only its seal."""
    text = json.dumps({str(path.relative_to(folder)): _digest(path) for path in _files(folder)}, indent=1)
    (folder / DIGESTS).write_text(text, encoding="utf-8")


def check_sealed(folder: Path) -> bool:
    """Whether the folder has a seal. A missing or changed file is refused, with its name in the folder.

    Files that were added to the folder are ignored.
    """
    seal_file = folder / DIGESTS
    if not seal_file.is_file():
        return False
    try:
        expected = json.loads(seal_file.read_bytes())
    except (ValueError, RecursionError):
        expected = None
    if not isinstance(expected, dict) or not expected:
        raise DamagedError(f"{DIGESTS} is damaged")
    for name, digest in expected.items():
        if not (folder / name).is_file():
            raise DamagedError(f"{name} is missing")
        if _digest(folder / name) != digest:
            raise DamagedError(f"{name} is damaged: it does not match {DIGESTS}")
    return True


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            if path.name != DIGESTS:
                yield path
        elif (path / DIGESTS).is_file():
            yield path / DIGESTS
        else:
            yield from _files(path)


def _digest(path: Path) -> list[Any]:
    """Size of a file, and the BLAKE2b digest of the BLAKE2b digests of its pieces."""
    size = path.stat().st_size
    with path.open("rb") as file, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

        def piece(start: int) -> bytes:
            return blake2b(os.pread(file.fileno(), PIECE, start), digest_size=16).digest()

        whole = blake2b(b"".join(pool.map(piece, range(0, size, PIECE))), digest_size=16)
    return [size, whole.hexdigest()]


def refuse_gone(path: Path, opened: os.stat_result) -> None:
    """Refuse a file that was deleted or replaced since it was opened, because anything written to it would be lost."""
    try:
        same = os.path.samestat(path.stat(), opened)
    except (FileNotFoundError, NotADirectoryError):
        same = False
    if not same:
        raise OSError(errno.ENOENT, "the file was deleted or replaced while it was in use: restore it", str(path))


@contextmanager
def alone(folder: Path, doing: str = "training this run") -> Iterator[None]:
    """Lock the folder, or refuse it if another process is `doing` this in it. Both would write the same files.

    A resume takes the lock before it reads anything, because earlier readings may be out of date.
    """
    with (folder / LOCK).open("a") as held:  # NFS grants an exclusive lock only on a file opened for writing
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SoleraError(f"{folder}: another process is {doing}: wait for it, or stop it") from error
        yield
