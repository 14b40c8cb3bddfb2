"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def write_whole(target: Path, text: str) -> Path:
    with appearing(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return target
