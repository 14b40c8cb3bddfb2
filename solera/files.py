"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solera.errors import SoleraError


def beside(target: Path) -> Path:
    """Where a file is written until it is whole."""
    return target.with_name(f".unfinished-{target.name}")


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """The file to write to; it takes the target's place when it is whole. A full disk names the target and leaves
    nothing."""
    unfinished = beside(target)
    try:
        yield unfinished
        unfinished.replace(target)
    except OSError as error:
        if error.filename not in (None, str(unfinished)):  # what is at fault is what was read
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def writable(target: Path, named: str) -> Path:
    """The file, refused before the work is done and not after it; `named` is how its user calls it."""
    try:
        if target.is_dir():
            raise SoleraError(f"{named}: this is a folder; name a file")
        beside(target).touch()
        beside(target).unlink()
    except OSError as error:
        raise SoleraError(f"{named}: no file can be written into {target.parent}: {error.strerror}") from error
    return target


def write_whole(target: Path, text: str) -> Path:
    with appearing(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return target
