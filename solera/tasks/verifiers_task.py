"""Environments of the package `verifiers` as a task. They run in another process (`verifiers_worker.py`), which may use
another Python installation, because the package's requirements do not fit every installation. An environment asks for
completions as it would ask a server.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from weakref import WeakKeyDictionary

from solera.errors import SoleraError, one_line
from solera.protocols import Codec, Generate
from solera.records import Prompt, Reward, Rollout
from solera.tasks.environments import HELD_OUT_SHARE
from solera.tasks.jsonl import shuffled
from solera.tasks.tool_calls import format_of
from solera.tasks.verifiers_talk import Talk, plain

PYTHON = "SOLERA_VERIFIERS_PYTHON"
"""Environment variable that names the Python installation with verifiers. By default it is Solera's own."""
WORKER = Path(__file__).with_name("verifiers_worker.py")
MOST = 1000
"""Tasks that are used of an endless set of tasks."""
SECONDS = 600.0
"""Most seconds of an episode."""
GRACE = 2.0
"""Seconds that the process has to end by itself."""


class VerifiersTask:
    """The tasks of an environment. One in eight is held out. `path` is a TOML file with verifiers' settings of the
    environment (`[env]`)."""

    def __init__(self, name: str, path: str | None, codec: Codec) -> None:
        self.name = name
        self.codec = codec
        self.format = format_of(codec)
        self.settings = {"name": name, "path": path and str(Path(path).expanduser().resolve()), "most": MOST}
        tasks = _listed(self.settings)
        self._prompts = [self._prompt(number, task) for number, task in enumerate(tasks)]
        if len(tasks) < 2:
            raise SoleraError(
                f"task verifiers:{name}: it has {len(tasks)} tasks; at least 2 are needed to hold one out"
            )
        order = sorted(range(len(tasks)), key=lambda n: blake2b(tasks[n]["key"].encode(), digest_size=8).digest())
        count = max(1, len(tasks) // HELD_OUT_SHARE)
        self._held_out, self._training = order[:count], sorted(order[count:])
        self._workers: WeakKeyDictionary[asyncio.AbstractEventLoop, Worker] = WeakKeyDictionary()

    def prompt(self, index: int) -> Prompt:
        passes, place = divmod(index, len(self._training))
        return self._prompts[self._training[shuffled(0, passes, len(self._training))[place]]]

    def held_out(self, count: int) -> list[Prompt]:
        return [self._prompts[number] for number in self._held_out[:count]]

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        loop = asyncio.get_running_loop()
        worker = self._workers.get(loop)
        if worker is None or worker.ended:
            worker = self._workers[loop] = Worker(self.settings)
        talk = Talk(self.codec, self.format, generate)
        rewards = await worker.play(prompt.data["number"], talk)
        if talk.chat is None or not talk.chat.turns:
            raise SoleraError("the environment ended the episode before the policy wrote anything")
        given = [Reward(value, part) for part, value in rewards.items()]
        return talk.chat.rollout(prompt, *(given or [Reward(0.0)]))

    def _prompt(self, number: int, task: dict[str, Any]) -> Prompt:
        messages = task["messages"] or [{"role": "user", "content": ""}]  # the environment may write the first message
        ids = self.codec.chat(list(map(plain, messages)))
        return Prompt(f"verifiers:{self.name}/{task['key']}", ids, {"number": number, "messages": messages})


class Worker:
    """The process that plays. It is started once for an event loop, and ends with it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.ended = False
        self._settings = settings
        self._process: asyncio.Future[Process] = loop.create_future()
        self._playing = dict[int, tuple[Talk, asyncio.Future[dict[str, float]]]]()
        self._answering = set[asyncio.Task[None]]()
        self._number = 0
        self._serving = loop.create_task(self._serve(), context=Context())

    async def play(self, task: int, talk: Talk) -> dict[str, float]:
        """Play an episode, and return its rewards."""
        process = await asyncio.shield(self._process)
        number, self._number = self._number, self._number + 1
        ending = asyncio.get_running_loop().create_future()
        self._playing[number] = talk, ending
        self._send(process, {"play": number, "task": task})
        try:
            async with asyncio.timeout(SECONDS):
                return await ending
        except TimeoutError:
            raise SoleraError(f"the episode took longer than {SECONDS:g} s") from None
        finally:
            del self._playing[number]
            self._send(process, {"leave": number})

    async def _serve(self) -> None:
        """Start the process and do what it says until it ends."""
        said: IO[str] = TemporaryFile("w+", errors="replace")  # noqa: SIM115
        error: Exception = SoleraError("the process of the environment has ended")
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *_command("play", self._settings), stdin=PIPE, stdout=PIPE, stderr=said, limit=2**28,
                start_new_session=True,
            )  # fmt: skip
            assert process.stdout is not None
            while line := await process.stdout.readline():
                self._obey(process, json.loads(line))
            error = SoleraError(f"the process of the environment has ended: {_last_line(said)}")
        except OSError as failure:
            error = SoleraError(f"{_python()}: {one_line(failure)} ({PYTHON})")
        finally:
            self.ended = True
            if process is not None:
                await _end(process)
            said.close()
            waiting: list[asyncio.Future[Any]] = [self._process, *(ending for _, ending in self._playing.values())]
            for each in waiting:
                if not each.done():
                    each.set_exception(error)
                    each.exception()  # or asyncio complains if nobody asks

    def _obey(self, process: Process, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._process.set_result(process)
        elif "ask" in message:
            answering = asyncio.get_running_loop().create_task(self._answer(process, message), context=Context())
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)
        elif "end" in message and message["end"] in self._playing:
            ending = self._playing[message["end"]][1]
            if "error" in message and not ending.done():
                ending.set_exception(SoleraError(f"the environment failed: {one_line(message['error'])}"))
            elif not ending.done():
                ending.set_result({name: float(value) for name, value in message["rewards"].items()})
        elif "error" in message and not self._process.done():
            self._process.set_exception(SoleraError(one_line(message["error"])))

    async def _answer(self, process: Process, message: dict[str, Any]) -> None:
        playing = self._playing.get(message["episode"])
        if playing is None:
            self._send(process, {"ask": message["ask"], "error": "the episode is over"})
            return
        talk, ending = playing
        try:
            given = await talk.answer(message["body"])
        except Exception as error:  # of the engine, or of the conversation: the episode's own
            if not ending.done():
                ending.set_exception(error)
            given = {"error": one_line(error)}
        self._send(process, {"ask": message["ask"], **given})

    @staticmethod
    def _send(process: Process, message: dict[str, Any]) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(message).encode() + b"\n")


async def _end(process: Process) -> None:
    """Let the process end by itself, or kill it."""
    if process.stdin is not None:
        process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE):
            await process.wait()
    with suppress(ProcessLookupError):  # and what it has started
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _listed(settings: dict[str, Any]) -> Sequence[dict[str, Any]]:
    what = f"task verifiers:{settings['name']}"
    try:
        done = subprocess.run(_command("list", settings), capture_output=True, text=True, check=False)
    except OSError as error:
        raise SoleraError(f"{what}: {_python()}: {one_line(error)}: set {PYTHON}") from error
    told: dict[str, Any] = (
        json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {"error": done.stderr[-300:]}
    )
    if "tasks" in told:
        return told["tasks"]
    hint = (
        f": install the extra verifiers, or set {PYTHON} to a Python that has the package"
        if "No module named 'verifiers'" in told["error"]
        else ""
    )
    raise SoleraError(f"{what}: {one_line(told['error'])}{hint}")


def _command(what: str, settings: dict[str, Any]) -> list[str]:
    return [_python(), "-P", str(WORKER), what, json.dumps(settings)]  # -P: the folder has a module named numbers


def _python() -> str:
    return os.environ.get(PYTHON) or sys.executable


def _last_line(said: IO[str]) -> str:
    said.seek(0)
    return next((line.strip() for line in reversed(said.read().splitlines()) if line.strip()), "")
