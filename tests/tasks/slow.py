"""What a grader's process may do to itself."""

import os
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


def fail() -> None:
    raise KeyboardInterrupt


def double(number: int) -> int:
    return 2 * number
