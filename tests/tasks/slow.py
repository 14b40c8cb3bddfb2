"""What code in an answer may do to the process that grades it, and to everything else."""

import contextlib
import os
import resource
import signal
import sys
import time

PATIENCE = 4
"""A child that waits is killed after this multiple of its limit, so that tests wait for less than half the time."""


def prepare() -> None:
    print("this is no reply")
    sys.modules["__main__"].PATIENCE = PATIENCE  # of `solera.tasks.judge`, whose process this is


def hostile(function: str):
    """A grader that runs this function, as some graders run an answer."""
    return globals()[function]


def run(code: str) -> object:
    """Run code, and give back what it calls `said`."""
    names = {"__name__": "answer"}
    exec(code, names)
    return names.get("said")


def compute() -> None:
    while True:
        pass


def compute_and_ignore_signals() -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    compute()


def sleep() -> None:
    time.sleep(600)


def die() -> None:
    os._exit(3)


def leave() -> None:
    os._exit(0)


def kill_the_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def forge(reply: str = '{"value": 1.0}') -> None:
    for file in range(3, 9):
        with contextlib.suppress(OSError):
            os.write(file, reply.encode() + b"\n")
    time.sleep(1)


def fail() -> None:
    raise KeyboardInterrupt


def double(number: int) -> int:
    return 2 * number
