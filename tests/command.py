"""`solera` in a process of its own, without the seconds that a new process takes to import torch.

On Linux a server (`tests.forking`) that has imported everything forks a process for the command. xdist's workers share
one server, which xdist's first process starts; without xdist, pytest starts one when it needs it. The fork has its own
directory, environment, standard streams, arguments, signal handlers and exit status, and runs `python -m solera.cli`
from its first line to its exit handlers.

A new process starts instead
- if the command gets another value of a variable that Python or a library reads when it starts (`READ_AT_START`);
- if the test asks for it with `fresh=True`, because Python then orders sets of strings in another way;
- if the system is not Linux.

`Process` calls a function of a test in such a fork.

Tests of the start itself do not use this module: help without torch, what is refused before torch is loaded, a hub that
does not answer, kernels in Triton's interpreter.
"""

import atexit
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SEARCH_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
READ_AT_START = (
    "CUDA", "HF_", "HOME", "KMP_", "LANG", "LC_", "LD_", "MKL_", "MPL", "OMP_", "OPENBLAS_", "PYTHON", "TOKENIZERS_",
    "TORCH", "TRANSFORMERS_", "TRITON_", "TZ", "XDG_",
)  # fmt: skip
"""How the names of these variables begin."""
ENCODING = "PYTHONIOENCODING"
"""The variable of which a fork knows what to do: it opens its streams anew."""
ADDRESS = "TESTS_FORKING"
"""The variable with the server's address."""


def solera(
    *arguments: object, cwd: Path = ROOT, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command `solera` to its end."""
    return _to_its_end(start(*arguments, cwd=cwd, fresh=fresh, **environment))


def start(
    *arguments: object, cwd: Path = ROOT, fresh: bool = False, **environment: str
) -> "Forked | subprocess.Popen[str]":
    """Start the command `solera`. Its output can be read, and it can be waited for and signalled."""
    return _begin(None, arguments, cwd, fresh, environment)


def run_script(
    path: Path, *arguments: object, cwd: Path = ROOT, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program that uses solera to its end."""
    return _to_its_end(_begin(path.resolve(), arguments, cwd, fresh, environment))


def _to_its_end(process: "Forked | subprocess.Popen[str]") -> subprocess.CompletedProcess[str]:
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _begin(
    script: Path | None, arguments: tuple[object, ...], cwd: Path, fresh: bool, changes: dict[str, str]
) -> "Forked | subprocess.Popen[str]":
    given, environment = list(map(str, arguments)), {**_surroundings(), **changes}
    if fresh or sys.platform != "linux" or _read_at_start(environment) != _read_at_start(_surroundings()):
        program = [str(script)] if script else ["-m", "solera.cli"]
        return subprocess.Popen(
            [sys.executable, *program, *given], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    return Forked(given, script and str(script), cwd, environment)


def _surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SEARCH_PATH}


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name != ENCODING}


class Forked:
    """A fork of the server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: list[str], script: str | None, cwd: Path, environment: dict[str, str]) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self.stdout, self.stderr = open(out), open(err)  # noqa: SIM115
        with open(out_end), open(err_end):
            self._ask(out_end, err_end, arguments=arguments, script=script, cwd=str(cwd), environment=environment)

    def _ask(self, out: int, err: int, **request: object) -> None:
        self.args, self.returncode = request["arguments"], None
        self._answers, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with their_end:
            given = [0, out, err, their_end.fileno()]
            socket.send_fds(_server(), [json.dumps(request).encode()], given)
        self.pid = self._answer("pid")

    def _answer(self, about: str) -> int:
        name, _, number = self._answers.recv(64).decode().partition(" ")
        assert name == about, f"the server was asked for the {about} of {self.args} and said {name!r} {number}"
        return int(number)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = self._answer("status")
            except (TimeoutError, BlockingIOError) as late:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from late
            self._answers.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the command still writes, until its end."""
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self.wait(timeout)
            out, err = (text.result() for text in texts)
        self.__exit__()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


class Called(Forked):
    """A function of a test in a fork of the server, with the methods of `multiprocessing.Process` that tests use."""

    def __init__(self, target: Callable[..., object], args: tuple[object, ...] = ()) -> None:
        self._call = {"module": target.__module__, "call": b64encode(pickle.dumps((target, args))).decode()}

    def start(self) -> None:
        self._ask(1, 2, arguments=[], script=None, cwd=os.getcwd(), environment=_surroundings(), **self._call)

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout)

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None


Process = Called if sys.platform == "linux" else multiprocessing.get_context("spawn").Process


@lru_cache
def _server() -> socket.socket:
    """Where requests go."""
    if ADDRESS not in os.environ:
        start_server()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ[ADDRESS])
    return connection


def start_server() -> None:
    """Start the server, which ends with this process, and tell processes that start later where it is."""
    folder = TemporaryDirectory()
    address = f"{folder.name}/forking"
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        owner.connect(address)  # waits in the queue until the server has loaded everything
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forking", str(listener.fileno())], cwd=ROOT,
            env={**_surroundings(), "OPENBLAS_NUM_THREADS": "1"},  # its threads start with numpy, and forks lose them
            pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    os.environ[ADDRESS] = address

    def end() -> None:
        owner.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)
