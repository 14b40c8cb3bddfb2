"""Runs a command, and ends it with everything it started when the parent is gone.

Used as a program: `python watchdog.py PARENT FOLDER COMMAND...`. It needs the standard library only, so that it starts
at once. It ends the command's processes when

- the process PARENT is no longer its parent, also if that was killed with SIGKILL;
- it gets SIGTERM;
- the command has ended (a server may leave its engine process behind).

The processes get SIGTERM, and SIGKILL after `PATIENCE` seconds. Then FOLDER, where weights were passed on, is removed.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

LOOK = 0.2
"""Seconds between two looks at the parent and the command."""
PATIENCE = 4.0
SUBREAPER = 36
"""prctl: orphans below this process become its children, so that none is lost."""
DEATH_SIGNAL = 1
"""prctl: the signal that a process gets when its parent ends."""

stopping = False


def stop(number: int, frame: FrameType | None) -> None:
    global stopping  # noqa: PLW0603
    stopping = True


def control(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    control(DEATH_SIGNAL, signal.SIGKILL)


def descendants() -> list[int]:
    """All processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(name))
    found, waiting = list[int](), [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def signal_all(number: int) -> None:
    for process in descendants():
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def end(patience: float = PATIENCE) -> None:
    """End all processes below this one. Returns when none is left."""
    signal_all(signal.SIGTERM)
    deadline = time.monotonic() + patience
    while descendants() and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
    while descendants():
        signal_all(signal.SIGKILL)
        reap()
        time.sleep(0.05)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:
        return


def main(parent: int, folder: str, command: list[str]) -> int:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control(SUBREAPER, 1)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509 (one thread)
    while child.poll() is None and os.getppid() == parent and not stopping:
        time.sleep(LOOK)
    status = child.returncode
    end()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if stopping else status or 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
