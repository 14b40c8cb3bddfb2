"""A server that has loaded what `solera` needs, and forks a process for each command. `tests.command` asks it.

Run as `python -m tests.forking DESCRIPTOR`. The descriptor is a socket that accepts connections. Each message on one of
them is a request in JSON, and carries four descriptors: the command's standard streams and a socket for the answers.
The command's process answers with its id, and the server answers with its exit status.
"""

import atexit
import gc
import importlib
import json
import os
import pickle
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
from base64 import b64decode
from contextlib import suppress
from io import BytesIO, TextIOWrapper

LIBRARIES = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorboard.summary.writer.event_file_writer",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
"""What commands import while they run. A library that is missing here costs time, nothing else."""
LONGEST = 1 << 20
"""Bytes of a request."""
LEAVING: list[int] = []
"""The exit status of a program that has come to its end."""


def main() -> None:
    atexit.register(leave)
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, and the server ends with it
    load()
    request, descriptors = serve(listener)
    become(request, descriptors)
    run(request)


def run(request: dict) -> None:
    """Run the program. Python ends the fork as it ends any program: it prints an exception, joins threads, calls exit
    handlers. Only the second that it then takes to take all modules apart is saved, where the exit status is known."""
    try:
        if "call" in request:
            function, arguments = pickle.loads(b64decode(request["call"]))
            function(*arguments)
        elif request["script"]:
            runpy.run_path(request["script"], run_name="__main__")
        else:
            runpy.run_module("solera.cli", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if isinstance(stop.code, int):
            LEAVING.append(stop.code)
        raise
    LEAVING.append(0)


def leave() -> None:
    """The exit handler that is called last, since it is the first."""
    if LEAVING:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LEAVING[0] & 0xFF)


def load() -> None:
    """Import every module of solera, those for a GPU or inside vLLM aside, and the libraries."""
    import solera

    for module in pkgutil.walk_packages(solera.__path__, "solera."):
        last = module.name.rpartition(".")[2]
        if last not in ("kernels", "compiling", "__main__") and module.name != "solera.engines.vllm.worker":
            importlib.import_module(module.name)
    for name in LIBRARIES:
        importlib.import_module(name)
    fill_caches()
    gc.collect()
    gc.freeze()  # or the first collection in each fork would copy all that was loaded
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread, which a fork would lose"


def fill_caches() -> None:
    """Of the packages that read options, load models and draw pictures, and of the held-out problems. Otherwise each
    command would fill them."""
    import tyro
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from solera.cli.options import parse
    from solera.config import Config
    from solera.report.plot import draw
    from solera.tasks.arithmetic import all_held_out

    all_held_out(2)
    parse(Config(), ["--run.steps", "1"], "train", "", "", tyro.conf.FlagConversionOff)
    get_checkpoint_conversion_mapping("llama")
    draw([{"step": 0, "eval/pass@1": 0.5, "age/mean": 0.0}], "").savefig(BytesIO())


def serve(listener: socket.socket) -> tuple[dict, list[int]]:
    """Fork for every request, until the first connection ends. Returns in the forks: a request and its descriptors."""
    waiting, owner = selectors.DefaultSelector(), listener.accept()[0]
    for each in (listener, owner):
        waiting.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.data is not None:
                tell_the_end(waiting, key)
                continue
            if key.fileobj is listener:
                waiting.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            text, descriptors, *_ = socket.recv_fds(key.fileobj, LONGEST, 4)
            if not text:
                leave_connection(waiting, key.fileobj, owner)
                continue
            request = json.loads(text)
            if "module" in request:
                importlib.import_module(request["module"])  # here, so that later forks have it
            pid = os.fork()
            if not pid:
                close_the_rest(waiting)
                return request, descriptors
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, socket.socket(fileno=descriptors[3])))


def leave_connection(waiting: selectors.BaseSelector, connection: socket.socket, owner: socket.socket) -> None:
    if connection is owner:
        os._exit(0)
    waiting.unregister(connection)
    connection.close()


def tell_the_end(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, answers = key.data
    waiting.unregister(key.fd)
    os.close(key.fd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with answers, suppress(BrokenPipeError):  # nobody may be waiting for it
        answers.send(f"status {status}".encode())


def close_the_rest(waiting: selectors.BaseSelector) -> None:
    """Close what belongs to the server and to other commands."""
    for key in list(waiting.get_map().values()):
        if key.data is None:
            key.fileobj.close()
        else:
            os.close(key.fd)
            key.data[1].close()
    waiting.close()


def become(request: dict, descriptors: list[int]) -> None:
    """Make this process what a new one would be that was started with the request."""
    import numpy

    request["streams"] = sys.stdin, sys.stdout, sys.stderr  # kept, or their end would close the descriptors
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    encoding = request["environment"].get("PYTHONIOENCODING")
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = written(sys.stdout, 1, encoding, "strict")
    sys.stderr = sys.__stderr__ = written(sys.stderr, 2, encoding, "backslashreplace")
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    sys.path[0] = os.path.dirname(request["script"]) if request["script"] else os.getcwd()
    numpy.random.seed()  # or all forks would draw the same
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.socket(fileno=descriptors[3]) as answers:
        answers.send(f"pid {os.getpid()}".encode())


def written(before: TextIOWrapper, descriptor: int, encoding: str | None, errors: str) -> TextIOWrapper:
    """A stream like the one before or, with an encoding, as Python opens it for PYTHONIOENCODING."""
    buffering = 1 if before.line_buffering or before.write_through else -1
    chosen = (encoding, errors) if encoding else (before.encoding, before.errors)
    return open(descriptor, "w", buffering, encoding=chosen[0], errors=chosen[1], closefd=False)


if __name__ == "__main__":
    main()
