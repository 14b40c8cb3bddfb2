"""Connects a run to its vLLM servers, and starts the servers if the run should."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

from solera.config import Config
from solera.engines.member import Opened
from solera.engines.pool import EnginePool
from solera.engines.vllm import checks, launch
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.http import CONTROL, Http
from solera.engines.vllm.launch import Launched
from solera.engines.vllm.transport import FileTransport, GroupTransport, IpcTransport, Transport, transfer_folder
from solera.folder.paths import SERVER, WEIGHTS
from solera.models.source import obtain
from solera.protocols import Weights
from solera.run.parts import Parts

SAMPLE = 200
"""Tokens of the text with which two tokenizers are compared."""


def open_servers(parts: Parts, path: str, longest: int, folder: Path) -> EnginePool:
    """The run's servers, as one engine. `path` is the model to start them with; its weights are replaced at the first
    sync. `longest` is the number of tokens of the longest prompt, as far as it is known."""
    engine = parts.config.engine
    shutil.rmtree(folder / WEIGHTS, ignore_errors=True)  # of a run that was killed
    if engine.launch:
        opens = [partial(_launch, parts, path, longest, folder, number) for number in range(engine.launch)]
    else:
        opens = [partial(_connect, parts, url, longest, folder, number) for number, url in enumerate(engine.urls)]
    return EnginePool(opens, timeout=engine.timeout, say=parts.say)


def _launch(parts: Parts, path: str, longest: int, folder: Path, number: int) -> Opened:
    """Start a server and connect to it."""
    config, model, ours = parts.config, parts.model, ours_of(parts, longest)
    size = sum(parameter.numel() * parts.compute.itemsize for parameter in model.parameters().values())
    passing = transfer_folder(folder / WEIGHTS, size * config.engine.launch)
    launched = launch.launch(
        obtain(path), dtype=ours.dtype, max_length=ours.max_length, on_gpu=model.device.type == "cuda",
        gpu_memory=config.engine.gpu_memory or launch.GPU_MEMORY / config.engine.launch, args=config.engine.args,
        folder=folder / SERVER, passing=passing, say=parts.say, number=number,
    )  # fmt: skip
    try:
        return _opened(parts, launched.url, longest, passing, number, launched)
    except BaseException:
        launched.close()
        raise


def _connect(parts: Parts, url: str, longest: int, folder: Path, number: int) -> Opened:
    return _opened(parts, url, longest, folder / WEIGHTS, number, None)


def _opened(parts: Parts, url: str, longest: int, passing: Path, number: int, launched: Launched | None) -> Opened:
    engine = open_server(parts, url, longest, passing, number, launched)
    return Opened(f"vLLM server {engine.http.url}", engine)


def open_server(
    parts: Parts, url: str, longest: int, passing: Path, number: int = 0, launched: Launched | None = None
) -> VllmEngine:
    """One server, checked. Weights are passed on in the folder `passing`."""
    http = Http(url, min(CONTROL, parts.config.engine.timeout))
    try:
        release, facts = checks.release_at(http), checks.check(http, ours_of(parts, longest))
        if http.get("/is_paused")["is_paused"]:  # by a trainer that was killed during a sync
            http.post("/resume")
    except BaseException:
        http.close()
        raise
    return VllmEngine(
        http, release, facts, _transport(parts.config, parts.model.device, http, passing, number),
        end_token_ids=parts.codec.end_token_ids, spell=parts.codec.decode, launched=launched,
    )  # fmt: skip


@contextmanager
def serving(parts: Parts, path: str, lineage: str = "", version: int = 0) -> Iterator[EnginePool | None]:
    """Servers with the weights of the parts' model, for as long as the block lasts; `None` if the config has no
    server. Their logs stay if the block fails."""
    if parts.config.engine.name != "vllm":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="solera-"))
    longest = max((len(prompt.token_ids) for prompt in parts.task.held_out(1)), default=1)
    engine = open_servers(parts, path, longest, folder)
    try:
        engine.load(Weights(lineage, version, ((name, p.detach()) for name, p in parts.model.parameters().items())))
        yield engine
    finally:
        engine.close()
    shutil.rmtree(folder)


def ours_of(parts: Parts, longest: int) -> checks.Ours:
    """What a server must have to serve the run's model, for prompts of up to `longest` tokens."""
    model, codec = parts.model, parts.codec
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    fields = {name: getattr(model.module.config, name, None) for name in names}
    sample = codec.decode(np.arange(min(SAMPLE, len(codec.tokenizer)), dtype=np.int32))
    tokens = codec.tokenizer.encode(sample, add_special_tokens=False)
    length, needed = model.max_length, longest + parts.config.sampling.max_tokens
    needed = needed if length is None else min(needed, length)
    known = {name: value for name, value in fields.items() if value is not None}
    return checks.Ours(known, str(parts.compute), length, needed, sample, tokens)


def _transport(config: Config, device: torch.device, http: Http, passing: Path, number: int) -> Transport:
    chosen = config.sync.transport
    if chosen == "auto":
        chosen = "ipc" if config.engine.launch and device.type == "cuda" else "file"
    if chosen == "file":
        return FileTransport(passing, number)
    return IpcTransport() if chosen == "ipc" else GroupTransport(device, _address_towards(http))


def _address_towards(http: Http) -> str:
    """The address of this machine that the server can reach."""
    parts = urlsplit(http.url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])
