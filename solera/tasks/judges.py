"""Processes that grade answers in a sandbox, with a time limit for each question.

A text may hold an expression that takes forever, or all memory, to evaluate, and no timeout inside a process stops
that. It may also hold code. A process that takes too long is killed, and the next question goes to a new one. The limit
is on CPU time, so that verdicts do not depend on how busy the machine is.
"""

import asyncio
import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from queue import LifoQueue
from typing import Any

from solera.errors import SoleraError
from solera.tasks.judge import PATIENCE
from solera.tasks.sandbox import environment

log = logging.getLogger(__name__)

LIMIT = 3
"""CPU seconds for one question."""
START = 120.0
"""Seconds for a process to import its packages."""
LENIENCE = 3
"""A process enforces its own limits. If it does not, it is given up after this multiple of its longest time."""
MOST = 8


Question = tuple[str, tuple[Any, ...], tuple[Any, ...] | None, int, bool]
"""A function, its arguments, the answer to grade (if any), the limit, and whether the answer could be code."""


class NoVerdictError(Exception):
    """The question took too long, killed its process, or raised an error."""


class Judges:
    """Processes that call the functions of one module, started when needed."""

    def __init__(self, module: str, extra: str | None) -> None:
        self._idle: LifoQueue[Judge] = LifoQueue()  # one question after the other needs one process
        self.count = min(MOST, os.cpu_count() or 1)
        for _ in range(self.count):
            self._idle.put(Judge(module, extra))
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="solera-judge")

    def ask(self, function: str, *given: Any, limit: int = LIMIT) -> Any:
        """Return what a function returns. Arguments and value are plain data, and none of it comes from a response."""
        return self._asked((function, given, None, limit, False))

    def ask_all(self, function: str, calls: list[tuple[Any, ...]], limit: int) -> list[Any]:
        """Call several at once; return the results in order."""
        return list(self._threads.map(lambda given: self.ask(function, *given, limit=limit), calls))

    def grade(
        self, function: str, given: tuple[Any, ...], answer: tuple[Any, ...], code: bool, limit: int = LIMIT
    ) -> Any:
        """Grade the answer of a response. `function(*given)` returns the grader.

        With `code`, the answer could be code that the grader runs. Such code can forge the value returned here, of any
        type, but nothing else: its process grades nothing more.
        """
        return self._asked((function, given, answer, limit, code))

    async def judge(self, function: str, given: tuple[Any, ...], answer: tuple[Any, ...], code: bool) -> Any:
        """`grade`, concurrently with other callers."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self.grade, function, given, answer, code
        )

    def _asked(self, question: Question) -> Any:
        judge = self._idle.get()
        try:
            return judge.ask(question)
        finally:
            self._idle.put(judge)


@lru_cache
def judges(module: str, extra: str | None) -> Judges:
    """The one set of processes for a module. `extra` is the extra that installs its package. `None` stands for a module
    of Solera that runs no code from answers: it needs no sandbox."""
    return Judges(module, extra)


class Judge:
    """One process, which answers one question at a time."""

    def __init__(self, module: str, extra: str | None) -> None:
        self._module = module
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def ask(self, question: Question) -> Any:
        process = self._process or self._begin()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            reply = self._reply(process, LENIENCE * PATIENCE * question[3])
        except (BrokenPipeError, NoVerdictError) as error:
            self._end()
            raise NoVerdictError(str(error)) from error
        except BaseException:  # Ctrl-C: a late reply would be taken for the reply to the next question
            self._end()
            raise
        if "error" in reply:
            raise NoVerdictError(reply["error"])
        return reply["value"]

    def _begin(self) -> subprocess.Popen[bytes]:
        # Without a fixed hash seed, the order of sets, and so a generated problem, would differ from run to run.
        modules = os.pathsep.join(map(os.path.abspath, sys.path))
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "solera.tasks.judge", self._module], cwd="/",
            env=environment(PYTHONHASHSEED="0", PYTHONPATH=modules),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            reply = self._reply(process, START)
        except NoVerdictError as error:
            self._end()
            raise SoleraError(f"the grading process of {self._module} did not start: {error}") from error
        except BaseException:
            self._end()
            raise
        if "missing" in reply:
            self._end()
            what = f"{reply['missing']} is not installed" if reply["missing"] else reply["why"]
            raise SoleraError(f"{what}: pip install 'solera[{self._extra}]'")
        if reply["unprotected"] and self._extra is not None:
            _warn("; ".join(reply["unprotected"]))
        return process

    def _reply(self, process: subprocess.Popen[bytes], limit: float) -> dict[str, Any]:
        assert process.stdout is not None
        end, line, waiting = time.monotonic() + limit, b"", select.poll()  # select.select takes no file above 1023
        waiting.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
                raise NoVerdictError(f"it took longer than {limit:g} s")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise NoVerdictError("it computed for too long, or its process died")
            line += part
        return json.loads(line)

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None


@lru_cache
def _warn(missing: str) -> None:
    """Once, for all processes."""
    log.warning("solera: answers are graded without a full sandbox: %s; see docs/tasks.md, Hostile answers", missing)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the process and its child, which form a process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait()
