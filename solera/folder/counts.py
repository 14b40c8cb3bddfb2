"""Token counts in a small file that is mapped into memory, so that they are right even after a SIGKILL.

The kernel keeps what was written to the file's pages when the process ends. Only a crash of the machine can lose the
latest numbers. The file holds little-endian 64-bit integers in the order of `NAMES`.
"""

import threading
from pathlib import Path

import numpy as np

from solera.errors import SoleraError

SAMPLED = ("engine", "examiner")
"""Tokens sampled by the engine that writes training data, and by the one that evaluates the learner."""
PURPOSES = ("training", "probe", "canary", "evaluation")
"""Tokens of the responses that engines returned, by what they were for."""
UNSTORED = "unstored"
"""Tokens returned to training episodes that ended in no rollout: of failed attempts, of attempts that were repeated,
and of completions that a task left out."""
NAMES = (*SAMPLED, *PURPOSES, UNSTORED)


class Counts:
    """Whole numbers that only grow, by name. Without a path they are only in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        if path is None:
            self._values = np.zeros(len(NAMES), np.int64).data  # single numbers take less time than in an array
            return
        if not path.exists():
            path.write_bytes(bytes(8 * len(NAMES)))  # not sparse: a full disk is noticed here, not at some later token
        _refuse_damaged(path)
        self._values = np.memmap(path, "<i8", "r+", shape=(len(NAMES),)).data

    @classmethod
    def read(cls, path: Path) -> "Counts":
        """The numbers of a run as they are now."""
        _refuse_damaged(path)
        counts = cls()
        counts._values[:] = np.fromfile(path, "<i8").data
        return counts

    def __getitem__(self, name: str) -> int:
        value: int = self._values[NAMES.index(name)]
        return value

    def add(self, name: str, tokens: int) -> None:
        with self._lock:
            self._values[NAMES.index(name)] += tokens

    def raise_to(self, name: str, total: int) -> None:
        """Set a number, unless it is larger already."""
        place = NAMES.index(name)
        with self._lock:
            self._values[place] = max(self._values[place], total)

    def sum(self, *names: str) -> int:
        return sum(self[name] for name in names)


def _refuse_damaged(path: Path) -> None:
    if path.stat().st_size != 8 * len(NAMES):
        raise SoleraError(f"{path}: the file is damaged; delete it, and the counts start from what the store holds")
