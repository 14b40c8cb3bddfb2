"""Connects a run to its vLLM servers, and starts the servers if the run should."""

import dataclasses
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
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
from solera.engines.vllm.counter import TokenCounter
from solera.engines.vllm.http import Http
from solera.engines.vllm.launch import Launched
from solera.engines.vllm.opening import Reading, connect
from solera.engines.vllm.readings import Readings
from solera.engines.vllm.transport import FileTransport, GroupTransport, IpcTransport, Transport, transfer_folder
from solera.folder.counts import Counts
from solera.folder.paths import SERVER, WEIGHTS
from solera.models.language_model import LanguageModel
from solera.models.source import base_of, obtain
from solera.protocols import Weights
from solera.run.parts import Parts

SAMPLE = 200
"""Tokens of the text with which two tokenizers are compared."""


def open_servers(parts: Parts, path: str, longest: int, folder: Path, counts: Counts) -> EnginePool:
    """The run's servers, as one engine. `path` is the model to start them with; its weights are replaced at the first
    sync. `longest` is the number of tokens of the longest prompt, as far as it is known. `counts` get what servers that
    run already had sampled when the run was killed."""
    engine = parts.config.engine
    if parts.model.adapter is not None:
        parts.model.adapter.base(parts.compute)  # refuses adapters that a server cannot add, before it is started
    for passing in folder.glob(f"{WEIGHTS}*"):  # of a run that was killed
        shutil.rmtree(passing, ignore_errors=True)
    if engine.launch:
        opens = [partial(_launch, parts, path, longest, folder, number) for number in range(engine.launch)]
    else:
        connect = partial(
            _connect, parts, longest, folder, dict[str, TokenCounter](), Readings(folder / SERVER, counts)
        )
        opens = [partial(connect, url, number) for number, url in enumerate(engine.urls)]
    return EnginePool(opens, timeout=engine.timeout, say=parts.say)


def _launch(parts: Parts, path: str, longest: int, folder: Path, number: int) -> Opened:
    """Start a server and connect to it."""
    config, model, ours = parts.config, parts.model, ours_of(parts, longest)
    own = folder / (f"{WEIGHTS}-{number}" if number else WEIGHTS)  # a server that ends takes its folder with it
    passing = transfer_folder(own, size_of(parts) * config.engine.launch)
    source = obtain(path)
    launched = launch.launch(
        base_of(source) or source, dtype=ours.dtype, max_length=ours.max_length, on_gpu=model.device.type == "cuda",
        gpu_memory=config.engine.gpu_memory or launch.GPU_MEMORY / config.engine.launch, args=config.engine.args,
        folder=folder / SERVER, passing=passing, say=parts.say, number=number,
        together=config.engine.launch,
    )  # fmt: skip
    try:
        return _named(open_server(parts, launched.url, longest, passing, number, launched))
    except BaseException:
        launched.close()
        raise


def _connect(
    parts: Parts, longest: int, folder: Path, known: dict[str, TokenCounter], readings: Readings, url: str, number: int
) -> Opened:
    """Connect to a server that runs. Its tokens are counted as long as the run lasts, however often it connects."""

    def counter(http: Http, held: str) -> TokenCounter:
        if url not in known:
            known[url] = TokenCounter(http, readings, held)
        known[url].connect(http)
        return known[url]

    return _named(open_server(parts, url, longest, folder / WEIGHTS, number, counter=counter))


def _named(engine: VllmEngine) -> Opened:
    return Opened(f"vLLM server {engine.http.url}", engine)


def open_server(
    parts: Parts,
    url: str,
    longest: int,
    passing: Path,
    number: int = 0,
    launched: Launched | None = None,
    counter: Callable[[Http, str], TokenCounter] = lambda http, holds: TokenCounter(http),
) -> VllmEngine:
    """One server, checked. Weights are passed on in the folder `passing`. `counter` is given the lineage of the weights
    that the server holds."""
    adapter, codec = parts.model.adapter, parts.codec
    return connect(
        url, ours_of(parts, longest), Reading(codec.end_token_ids, codec.decode),
        lambda http: _transport(parts.config, parts.model.device, http, passing, number),
        timeout=parts.config.engine.timeout,
        base=partial(adapter.base, parts.compute) if adapter is not None else None,
        launched=launched, counter=counter,
    )  # fmt: skip


@contextmanager
def serving(parts: Parts, path: str, lineage: str = "", version: int = 0) -> Iterator[EnginePool | None]:
    """Servers with the weights of the parts' model, for as long as the block lasts; `None` if the config has no
    server. Adapters are merged first. The servers' logs stay if the block fails."""
    if parts.config.engine.name != "vllm":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="solera-"))
    if parts.model.adapter is not None:
        parts = dataclasses.replace(parts, model=LanguageModel(parts.model.adapter.merged()))
    longest = max((len(prompt.token_ids) for prompt in parts.task.held_out(1)), default=1)
    engine = open_servers(parts, path, longest, folder, Counts())
    try:
        engine.load(Weights(lineage, version, ((name, p.detach()) for name, p in parts.model.parameters().items())))
        yield engine
    finally:
        engine.close()
    shutil.rmtree(folder)


def size_of(parts: Parts) -> int:
    """Bytes of the weights that a server gets."""
    return sum(parameter.numel() * parts.compute.itemsize for parameter in parts.model.module.parameters())


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
