"""What a grader's process may do to itself."""

import contextlib
import os
import signal
import time


def prepare() -> None:
    print("this is no reply")


def compute() -> None:
    while True:
        pass


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
