"""Handles Ctrl-C for runs and sweeps. Does not import torch."""

import signal
import threading
from collections.abc import Callable
from typing import Any


class Interruption:
    """After one SIGINT or SIGTERM, the run finishes the step, saves and exits. A second one exits at once."""

    def __init__(self, say: Callable[[str], None] = lambda sentence: None) -> None:
        self._say = say
        self._asked = False
        self._before: dict[int, Any] = {}

    def wanted(self) -> bool:
        return self._asked

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._say("stopping after this step, which is saved first; interrupt again to stop at once")
