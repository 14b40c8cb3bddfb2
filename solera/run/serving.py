"""Connects a run to its vLLM server, and starts the server if the run should."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

from solera.config import Config
from solera.engines.vllm import checks, launch
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.http import Http
from solera.engines.vllm.transport import FileTransport, GroupTransport, IpcTransport, Transport, transfer_folder
from solera.folder.paths import SERVER, WEIGHTS
from solera.models.source import obtain
from solera.protocols import Weights
from solera.run.parts import Parts

SAMPLE = 200
"""Tokens of the text with which two tokenizers are compared."""


def open_server(parts: Parts, path: str, longest: int, folder: Path) -> VllmEngine:
    """The run's engine on a server. `path` is the model to start it with; its weights are replaced at the first sync.
    `longest` is the number of tokens of the longest prompt, as far as it is known."""
    config, model = parts.config, parts.model
    ours = ours_of(parts, longest + config.sampling.max_tokens)
    size = sum(parameter.numel() * parts.compute.itemsize for parameter in model.parameters().values())
    passing = transfer_folder(folder / WEIGHTS, size) if config.engine.launch else folder / WEIGHTS
    launched = None
    if config.engine.launch:
        launched = launch.launch(
            obtain(path), dtype=ours.dtype, max_length=ours.max_length, on_gpu=model.device.type == "cuda",
            gpu_memory=config.engine.gpu_memory, args=config.engine.args, folder=folder / SERVER, passing=passing,
            say=parts.say,
        )  # fmt: skip
    http = Http(launched.url if launched else config.engine.urls[0])
    try:
        release, facts = checks.release_at(http), checks.check(http, ours)
        if http.get("/is_paused")["is_paused"]:  # by a trainer that was killed during a sync
            http.post("/resume")
    except BaseException:
        http.close()
        if launched is not None:
            launched.close()
        raise
    return VllmEngine(
        http, release, facts, _transport(config, model.device, http, passing),
        end_token_ids=parts.codec.end_token_ids, spell=parts.codec.decode, launched=launched,
    )  # fmt: skip


@contextmanager
def serving(parts: Parts, path: str, lineage: str = "", version: int = 0) -> Iterator[VllmEngine | None]:
    """A server with the weights of the parts' model, for as long as the block lasts; `None` if the config has no
    server. Its log stays if the block fails."""
    if parts.config.engine.name != "vllm":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="solera-"))
    longest = max((len(prompt.token_ids) for prompt in parts.task.held_out(1)), default=1)
    engine = open_server(parts, path, longest, folder)
    try:
        engine.load(Weights(lineage, version, ((name, p.detach()) for name, p in parts.model.parameters().items())))
        yield engine
    finally:
        engine.close()
    shutil.rmtree(folder)


def ours_of(parts: Parts, needed: int) -> checks.Ours:
    """What a server must have to serve the run's model."""
    model, codec = parts.model, parts.codec
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    fields = {name: getattr(model.module.config, name, None) for name in names}
    sample = codec.decode(np.arange(min(SAMPLE, len(codec.tokenizer)), dtype=np.int32))
    tokens = codec.tokenizer.encode(sample, add_special_tokens=False)
    length = model.max_length
    needed = needed if length is None else min(needed, length)
    known = {name: value for name, value in fields.items() if value is not None}
    return checks.Ours(known, str(parts.compute), length, needed, sample, tokens)


def _transport(config: Config, device: torch.device, http: Http, passing: Path) -> Transport:
    chosen = config.sync.transport
    if chosen == "auto":
        chosen = "ipc" if config.engine.launch and device.type == "cuda" else "file"
    if chosen == "file":
        return FileTransport(passing)
    return IpcTransport() if chosen == "ipc" else GroupTransport(device, _address_towards(http))


def _address_towards(http: Http) -> str:
    """The address of this machine that the server can reach."""
    parts = urlsplit(http.url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])
