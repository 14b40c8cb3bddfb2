"""The process behind `judges.py`: it answers one question per line. `python -m solera.tasks.judge MODULE`

Some packages evaluate an answer as Python. So a child of this process grades answers, and the child may only compute
(`sandbox`). It communicates only with this process. It is killed after an answer that could be code, and if it takes
too long, dies or sends an invalid reply. The next child is a fork of this process, which has the packages loaded.
"""

import gc
import importlib
import json
import math
import os
import resource
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from solera.errors import one_line
from solera.tasks.sandbox import confine, python_files, seal

MEMORY = 4 * 2**30
LARGEST = 2**24
"""Maximum size of a reply, in bytes."""
OPEN_FILES = 256
PATIENCE = 10
"""A child that waits instead of computing is killed after this multiple of its limit."""
TOKEN = 16
"""Length of the token before a child's question and reply, in characters."""
REPLIES = 3
"""The file descriptor for a child's replies."""

Reply = dict[str, Any]


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output printed by a package must not be taken for a reply
    try:
        module = importlib.import_module(sys.argv[1])
        module.prepare()
    except ImportError as error:
        print(json.dumps({"missing": error.name, "why": one_line(error)}), file=replies, flush=True)
        return
    judge = Judge(module)
    print(json.dumps({"value": None, "unprotected": _limit()}), file=replies, flush=True)
    for line in sys.stdin.buffer:
        print(json.dumps(judge.reply(line)), file=replies, flush=True)


def _limit() -> list[str]:
    """Drop all rights that no grader needs. Returns those that cannot be dropped here."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel kills graders first
    missing = confine(python_files())
    for kind, most in (("AS", MEMORY), ("FSIZE", 0), ("CORE", 0), ("NOFILE", OPEN_FILES)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    gc.collect()
    gc.freeze()  # so that a child copies fewer pages
    return missing


class BrokenChildError(Exception):
    """The child took too long, died, or sent an invalid reply."""


class Judge:
    """Answers questions about one module, with a child that grades."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._child: Child | None = None

    def reply(self, line: bytes) -> Reply:
        """Answer a question: call a function here or, if there is an answer to grade, call the function that it returns
        in the child."""
        function, given, answer, seconds, could_be_code = json.loads(line)
        if answer is None:
            return self._called(function, given, seconds)
        if self._child is None:
            prepared = self._called(function, given, seconds)  # the child finds it in the caches that it inherits
            if "error" in prepared:
                return prepared
            self._child = Child(self._module)
        try:
            reply = self._child.reply(line, PATIENCE * seconds)
        except BrokenChildError as error:
            reply, could_be_code = {"error": str(error)}, True
        if could_be_code:
            self._child.end()
            self._child = None
        return reply

    def _called(self, function: str, given: list[Any], seconds: int) -> Reply:
        _limit_computing(seconds)
        try:
            return _tried(lambda: getattr(self._module, function)(*given))
        finally:
            resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Child:
    """A sandboxed process that grades answers until it is killed."""

    def __init__(self, module: Any) -> None:
        (questions, self._questions), (self._replies, replies) = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            try:
                os.dup2(questions, 0)
                os.dup2(replies, REPLIES)
                os.closerange(REPLIES + 1, OPEN_FILES)
                seal()
                _grade(module)
            finally:
                os._exit(1)
        os.close(questions)
        os.close(replies)

    def reply(self, line: bytes, patience: float) -> Reply:
        token = secrets.token_hex(8).encode()
        with suppress(BrokenPipeError):  # it has died, which shows below
            os.write(self._questions, token + line)
        end, said, part = time.monotonic() + patience, b"", b""
        waiting = select.poll()
        waiting.register(self._replies, select.POLLIN)
        waiting.register(0, 0)  # only to notice if the caller is gone
        while b"\n" not in part:  # code may keep writing after its reply
            ready = waiting.poll(max(0.0, end - time.monotonic()) * 1000)
            if any(file == 0 for file, _ in ready):
                self.end()
                raise SystemExit
            if not ready:
                raise BrokenChildError(f"it took longer than {patience:g} s")
            part = os.read(self._replies, 1 << 16)
            said += part
            if not part or len(said) > LARGEST:
                raise BrokenChildError("it computed for too long, or its process died")
        return _checked(said, token)

    def end(self) -> None:
        os.close(self._questions)
        os.close(self._replies)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _checked(said: bytes, token: bytes) -> Reply:
    """A reply that hostile code may have written. The token only makes forging harder: code can search memory for
    it."""
    if not said.startswith(token):
        raise BrokenChildError("a reply was forged")
    try:
        reply = json.loads(said[TOKEN:])
    except (ValueError, RecursionError) as error:
        raise BrokenChildError("more than one reply came back") from error
    if isinstance(reply, dict) and "value" in reply:
        return {"value": reply["value"]}
    if isinstance(reply, dict) and isinstance(reply.get("error"), str):
        return {"error": reply["error"][:300]}
    raise BrokenChildError("a reply was forged")


def _grade(module: Any) -> None:
    for line in os.fdopen(0, "rb", closefd=False):
        function, given, answer, seconds, could_be_code = json.loads(line[TOKEN:])
        _limit_computing(seconds, last=could_be_code)
        reply = _tried(lambda: getattr(module, function)(*given)(*answer))  # noqa: B023
        os.write(REPLIES, line[:TOKEN] + json.dumps(reply).encode() + b"\n")


def _limit_computing(seconds: int, last: bool = False) -> None:
    """Start the limit now; SIGXCPU ends the process when it is exceeded. Code can ignore the signal and raise the
    limit, unless this is the `last`: then a second limit, which cannot be raised, ends it a second later."""
    soft = seconds + math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1 if last else resource.RLIM_INFINITY))


def _tried(call: Callable[[], Any]) -> Reply:
    try:
        return {"value": call()}
    except BaseException as error:  # packages signal their own timeouts with errors that are not an Exception
        return {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    main()
