"""Three processes that write to one store and are killed, again and again: `python -m tests.store.crashing …`.

It loads no torch, so that a life is a fork of a few milliseconds. After every call that returned, a process notes it in
a file of its own; what is noted was acknowledged.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from solera.records import Reward, Rollout, Sequence, Span, Use
from solera.store.database import Place, place_of
from solera.store.ledger import Ledger

GROUP = 4
PATIENCE = 30.0


def rollouts(key: str, rewards: tuple[Reward, ...]) -> list[Rollout]:
    """A group whose tokens tell its key and its members apart."""
    tokens = np.frombuffer(key.encode(), np.uint8).astype(np.int32)
    sequences = [Sequence(np.append(tokens, g).astype(np.int32), (Span(1, 3, 0),), None) for g in range(GROUP)]
    return [Rollout(key, (sequence,), rewards, origin="human") for sequence in sequences]


class Notes:
    """What was acknowledged, one line each."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_text().splitlines() if path.exists() else []
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, line: str) -> None:
        os.write(self.file, f"{line}\n".encode())


def collect(store: Ledger, notes: Notes, life: int) -> None:
    """Groups with their rewards."""
    for number in range(10**6):
        store.add(rollouts(f"graded/{life}/{number}", (Reward(1.0),)))
        notes.write(f"graded/{life}/{number}")


def grade_later(store: Ledger, notes: Notes, life: int) -> None:
    """Groups without rewards, and then the rewards."""
    for number in range(10**6):
        key = f"late/{life}/{number}"
        ids = store.add(rollouts(key, ()))
        notes.write(f"{key} added")
        store.revise([(id_, Reward(0.5, source="person")) for id_ in ids])
        notes.write(f"{key} rewarded")


def learn(store: Ledger, notes: Notes, life: int) -> None:
    """Draws a group at a time and records its use."""
    for number in range(10**6):
        for group in store.draw(1, GROUP):
            version = 10_000 * life + number
            ids = [rollout.id for rollout in group.rollouts if rollout.id is not None]
            store.record([Use(id_, version, None, 0.5) for id_ in ids])
            notes.write(" ".join(map(str, ids)))


ROLES = (collect, grade_later, learn)


def live(role: int, place: Place, folder: Path, life: int) -> int:
    """Fork a process that does its part until it is killed; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            ROLES[role](Ledger(place), Notes(folder / ROLES[role].__name__), life)
        finally:
            os._exit(1)
    return child


def sizes(folder: Path) -> list[int]:
    files = [folder / role.__name__ for role in ROLES]
    return [file.stat().st_size if file.exists() else 0 for file in files]


def wait_for_notes(folder: Path, before: list[int]) -> None:
    """Until every process has noted something, on a busy machine too."""
    deadline = time.monotonic() + PATIENCE
    while any(now == then for now, then in zip(sizes(folder), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.002)


def main(url: str, folder: str, lives: int, seed: int) -> None:
    place, rng, failures = place_of(url or None, Path(folder)), random.Random(seed), 0
    Ledger(place).close()
    for life in range(lives):
        before = sizes(Path(folder))
        children = [live(role, place, Path(folder), life) for role in range(len(ROLES))]
        if life % 2:  # the others may be killed before they have done anything
            wait_for_notes(Path(folder), before)
        for child in rng.sample(children, len(children)):
            time.sleep(rng.uniform(0.02, 0.12))
            os.kill(child, signal.SIGKILL)
            failures += os.waitpid(child, 0)[1] != signal.SIGKILL
    sys.exit(failures)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
