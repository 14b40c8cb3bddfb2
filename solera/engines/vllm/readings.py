"""The last readings of the counters of all servers of a run, in one file.

A run that was killed and is resumed counts on from these readings. One file holds all of them, together with what was
counted up to them, and is replaced at once. So a kill at any moment loses no count: not between the readings of two
servers, and not between a reading and the run's own counts (`folder/counts.py`).
"""

import json
import threading
from pathlib import Path
from typing import NamedTuple

from solera.errors import SoleraError
from solera.folder.counts import SAMPLED, Counts
from solera.folder.files import write_whole

FILE = "counters.json"
EARLIER = "counter-*.json"
"""Files of earlier versions of Solera, one for each server. They do not have the total."""


class Reading(NamedTuple):
    """What a server said."""

    tokens: int
    """Sampled since it was started."""
    started: float
    """When that was, in seconds since 1970; 0 if it does not say."""


class Kept(NamedTuple):
    """The last reading of one server."""

    reading: Reading
    excluded: int
    """Tokens to leave out of the next reading."""
    lineage: str
    """Of the weights that the server held."""
    total: int
    """Tokens that the run had counted at this server with this reading, in all its processes."""


class Readings:
    """The last readings by the servers' URLs, in `folder`. Raises the run's `counts` to what was read before a kill."""

    def __init__(self, folder: Path, counts: Counts) -> None:
        self._file = folder / FILE
        self._counts = counts
        self._lock = threading.Lock()
        earlier = sorted(folder.glob(EARLIER))
        self._elsewhere, self._servers = _read(self._file) if self._file.is_file() else (0, _earlier(earlier))
        """Tokens that were not counted by these readings, and the readings."""
        counts.raise_to(SAMPLED[0], self._elsewhere + self._read)
        if earlier:
            self._write()
        for file in earlier:
            file.unlink()

    @property
    def _read(self) -> int:
        return sum(kept.total for kept in self._servers.values())

    def of(self, url: str) -> Kept | None:
        return self._servers.get(url)

    def keep(self, url: str, kept: Kept) -> None:
        with self._lock:
            # The count may be ahead: a server can end before it is asked for what it has returned.
            self._elsewhere = max(self._elsewhere, self._counts[SAMPLED[0]] - self._read)
            self._servers[url] = kept
            self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, json.dumps({"elsewhere": self._elsewhere, "servers": self._servers}))


def _read(file: Path) -> tuple[int, dict[str, Kept]]:
    try:
        found = json.loads(file.read_text())
        servers = {
            url: Kept(Reading(*reading), excluded, lineage, total)
            for url, (reading, excluded, lineage, total) in found["servers"].items()
        }
        return found["elsewhere"], servers
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(file) from error


def _earlier(files: list[Path]) -> dict[str, Kept]:
    found = dict[str, Kept]()
    for file in files:
        try:
            url, reading, excluded, lineage = json.loads(file.read_text())
            found[url] = Kept(Reading(*reading), excluded, lineage, 0)
        except (ValueError, TypeError) as error:
            raise _damaged(file) from error
    return found


def _damaged(file: Path) -> SoleraError:
    return SoleraError(f"{file}: the file is damaged; delete it, and what servers have sampled since is not counted")
