"""Processes that grade in place of this one, each question with a time limit.

A text may hold an expression that takes for ever, or all memory, to evaluate: no timeout inside a process stops that.
A process that takes too long dies, and the next question goes to a new one. The limit is of computing time, so
that verdicts do not depend on how busy the machine is.
"""

import asyncio
import atexit
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

from solera.errors import SoleraError

LIMIT = 3
"""Seconds of computing for one question."""
PATIENCE = 10
"""A process that waits instead of computing is given up after so many times its limit."""
START = 120.0
"""Seconds in which a process must have imported its packages."""
MOST = 8


class NoVerdictError(Exception):
    """The question took too long, killed its process, or ended in an error."""


class Judges:
    """Processes that answer calls of one module's functions, begun when they are needed."""

    def __init__(self, module: str, extra: str) -> None:
        self._idle: SimpleQueue[Judge] = SimpleQueue()
        count = min(MOST, os.cpu_count() or 1)
        for _ in range(count):
            self._idle.put(Judge(module, extra))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="solera-judge")

    def ask(self, function: str, *arguments: Any, limit: int = LIMIT) -> Any:
        """What the function returns; arguments and value are plain data."""
        judge = self._idle.get()
        try:
            return judge.ask(function, arguments, limit)
        finally:
            self._idle.put(judge)

    def ask_all(self, function: str, calls: list[tuple[Any, ...]], limit: int) -> list[Any]:
        """Several at once, answered in their order."""
        return list(self._threads.map(lambda arguments: self.ask(function, *arguments, limit=limit), calls))

    async def judge(self, function: str, *arguments: Any) -> Any:
        """The same, while others ask too."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.ask, function, *arguments)


@lru_cache
def judges(module: str, extra: str) -> Judges:
    """The one set of processes for a module; `extra` is what a user installs to have its package."""
    return Judges(module, extra)


class Judge:
    """One process, which answers one question at a time."""

    def __init__(self, module: str, extra: str) -> None:
        self._module = module
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def ask(self, function: str, arguments: tuple[Any, ...], limit: int) -> Any:
        process, token = self._process or self._begin(), secrets.token_hex(8)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps([token, function, arguments, limit]).encode() + b"\n")
            process.stdin.flush()
            reply = self._reply(process, PATIENCE * limit)
            if "error" not in reply and (reply.get("token") != token or "value" not in reply):
                raise NoVerdictError("a reply was forged")  # what is graded may write to any file that is open
        except (BrokenPipeError, NoVerdictError) as error:
            self._end()
            raise NoVerdictError(str(error)) from error
        if "error" in reply:
            raise NoVerdictError(reply["error"])
        return reply["value"]

    def _begin(self) -> subprocess.Popen[bytes]:
        # Without a fixed hash seed the order of sets, and with it a generated problem, would differ from run to run.
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "solera.tasks.judge", self._module], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            reply = self._reply(process, START)
        except NoVerdictError as error:
            raise SoleraError(f"the grading process of {self._module} did not start: {error}") from error
        if "missing" in reply:
            self._end()
            what = f"{reply['missing']} is not installed" if reply["missing"] else reply["why"]
            raise SoleraError(f"{what}: pip install 'solera[{self._extra}]'")
        return process

    def _reply(self, process: subprocess.Popen[bytes], limit: float) -> dict[str, Any]:
        assert process.stdout is not None
        end, line = time.monotonic() + limit, b""
        while not line.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise NoVerdictError(f"it took longer than {limit:g} s")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise NoVerdictError("it computed for too long, or its process died")
            line += part
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NoVerdictError("more than a reply came back") from error
        if not isinstance(reply, dict):
            raise NoVerdictError("a reply was forged")
        return reply

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the process and its child, which are a group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait()
