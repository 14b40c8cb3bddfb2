"""Two real vLLM servers on the embedded model, shared by all tests of this folder."""

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from solera.config import Config, EngineConfig, override
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.launch import Launched, launch
from solera.models.loading import load_reader
from solera.models.source import EMBEDDED
from solera.protocols import Weights
from solera.run.parts import Parts, load_parts, resolved
from solera.run.serving import open_server
from solera.tasks.event_loop import EventLoop
from tests.vllm.proxy import Proxy

SMALL = ("--kv-cache-memory-bytes=67108864", "--block-size=32")
"""Little memory, and blocks that are short enough for a text of the embedded model to fill one."""


@pytest.fixture(scope="session")
def urls(request: pytest.FixtureRequest) -> list[str]:
    """The addresses of the servers. To use two that run already while you work on tests, set SOLERA_TEST_SERVERS."""
    running = os.environ.get("SOLERA_TEST_SERVERS", "").split()
    return running or [server.url for server in request.getfixturevalue("launched")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that kills a server comes last."""
    items.sort(key=lambda item: "doomed" in getattr(item, "fixturenames", ()))


@pytest.fixture
def second(urls: list[str]) -> str:
    return urls[1]


@pytest.fixture
def doomed(second: str) -> str:
    """The second server, for a test that kills it."""
    return second


@pytest.fixture(scope="session")
def url(urls: list[str]) -> str:
    return urls[0]


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    made = Proxy(url)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Launched]]:
    """Both start at the same time. Neither can import peft: only trainers need it."""
    folder = tmp_path_factory.mktemp("servers")
    (folder / "peft.py").write_text("raise ImportError('a server needs no peft')\n")

    def start(number: int) -> Launched:
        return launch(
            str(EMBEDDED), dtype="float32", max_length=64, on_gpu=False, gpu_memory=None, args=SMALL, folder=folder,
            passing=folder / f"passing-{number}", say=print, number=number, together=2,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        servers = list(threads.map(start, range(2)))
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def parts(url: str) -> Parts:
    config = Config(engine=EngineConfig("vllm", urls=(url,)))
    return load_parts(resolved(override(config, "run", name="served")))


@pytest.fixture
def engine(parts: Parts, tmp_path: Path) -> Iterator[VllmEngine]:
    """Connected, with the embedded model's own weights as version 0."""
    served = open_server(parts, parts.config.engine.urls[0], 8, tmp_path / "weights")
    served.load(weights_of(0))
    yield served
    served.close()


@pytest.fixture
def events() -> Iterator[EventLoop]:
    with EventLoop() as loop:
        yield loop


def model_of(version: int) -> torch.nn.Module:
    """The embedded model, with noise on all its weights from version 1 on. transformers' own code, not ours."""
    if version not in _MODELS:
        module = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * bool(version) * torch.randn(parameter.shape, generator=noise))
        _MODELS[version] = module
    return _MODELS[version]


_MODELS: dict[int, torch.nn.Module] = {}


def weights_of(version: int, lineage: str = "run") -> Weights:
    named = copy.deepcopy(dict(model_of(version).named_parameters()))
    return Weights(lineage, version, iter([(name, parameter.detach()) for name, parameter in named.items()]))


@torch.no_grad()
def forward_logp(version: int, prompt: tuple[int, ...], token_ids_T: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities of the tokens after the prompt, from one plain forward pass of transformers' model."""
    tokens = torch.tensor([[*prompt, *token_ids_T.tolist()]])
    logits_TV = model_of(version)(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits_TV, -1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


@pytest.fixture(scope="session")
def rambling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with so much noise that it hardly ever ends a text: responses cross syncs."""
    folder = tmp_path_factory.mktemp("rambling")
    model_of(1).save_pretrained(folder)
    load_reader("embedded").codec.tokenizer.save_pretrained(folder)
    return folder
