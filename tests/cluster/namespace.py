"""The processes of a network namespace.

Run as a program inside a namespace, it keeps the namespace until its standard input ends, and then ends all processes
there. So nothing is left of a test, however that ended.
"""

import os
import signal
import sys
import time
from pathlib import Path

PATIENCE = 30.0
"""Seconds in which processes must end after they were killed."""


def namespace_of(pid: int | str) -> str | None:
    """The name of a process's network namespace; `None` if it has ended or belongs to somebody else."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def processes_beside(pid: int) -> dict[int, str]:
    """The command lines of the other processes in the namespace of this one."""
    own, found = namespace_of(pid), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != pid and namespace_of(entry.name) == own:
            try:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def end_processes_beside(pid: int) -> None:
    """End all other processes in the namespace of this one."""
    deadline = time.monotonic() + PATIENCE
    while left := processes_beside(pid):
        assert time.monotonic() < deadline, f"these processes do not end: {left}"
        for other in left:
            try:
                os.kill(other, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    print("ready", flush=True)
    sys.stdin.read()
    end_processes_beside(os.getpid())
