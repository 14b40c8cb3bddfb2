"""The client of a vLLM server, against a small server in this process that loads, labels and pauses as vLLM does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solera.engines.faults import GarbageError, TakenError
from solera.engines.vllm import updates
from solera.engines.vllm.checks import Facts
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.counter import STARTED, TOKENS, TokenCounter
from solera.engines.vllm.http import ServerError
from solera.engines.vllm.transport import FileTransport
from solera.engines.vllm.updates import Updates
from solera.engines.vllm.versions import RELEASES
from solera.protocols import Weights
from solera.records import Sampling
from solera.sync.proof import SyncFaultError

VOCABULARY = 50


class Server:
    """`worker_label` is the worker's (`worker.py`), `label` the one that tokens get. `model` says what is loaded."""

    url = "http://server"

    def __init__(self) -> None:
        self.worker_label: str | None = None
        self.label: str | None = "default"
        self.refused: str | None = None
        self.tensors: list[Any] = []
        self.model: object = "first"
        self.paused = False
        self.update: Callable[[dict[str, Any]], None] = self.take
        self.finish: Callable[[str | None], None] = self.relabel
        self.draw: Callable[[dict[str, Any]], tuple[int, float]] = lambda asked: (7, -1.0)
        self.asked = list[dict[str, Any]]()

    def take(self, info: dict[str, Any]) -> None:
        self.refused = None
        self.model = self.worker_label = info["label"]
        self.tensors = info["tensors"]

    def relabel(self, label: str | None) -> None:
        self.label = label or self.label

    def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        if path.startswith("/pause") or path == "/resume":
            self.paused = path != "/resume"
        elif path == "/update_weights":
            self.update(body["update_info"])
        elif path == "/finish_weight_update":
            self.finish(body and body["weight_version"])
        elif path == RELEASES["0.24"].path:
            choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
            return {"choices": [choice]}
        elif path == "/collective_rpc":
            held = {"label": self.worker_label, "tensors": self.tensors, "refused": self.refused, "base": None}
            return {"results": [held]}
        elif path == RELEASES["0.32"].path:
            self.asked.append(body)
            token, logp = self.draw(body)
            span = {"version": self.label, "start": 0, "end": 1}
            choice = {"token_ids": [token], "logprobs": {"content": [{"logprob": logp}]}, "finish_reason": "length"}
            return {"choices": [choice | {"weight_versions": [span]}]}
        return None

    async def post_awaited(self, path: str, body: Any) -> Any:
        assert not self.paused
        return self.post(path, body)

    def get(self, path: str) -> Any:
        return {"world_size": 1}

    def text(self, path: str) -> str:
        return f'{TOKENS}{{engine="0"}} {len(self.asked)}.0\n{STARTED} 1.0\n'


@pytest.fixture
def server() -> Server:
    return Server()


def connected(
    server: Server, folder: Path, dtype: str = "torch.float32", block: int | None = None, release: str = "0.32"
) -> VllmEngine:
    http: Any = server
    told = RELEASES[release]
    return VllmEngine(
        http, told, Facts("m", VOCABULARY, dtype, 64, 8, block), Updates(http, told, FileTransport(folder)),
        TokenCounter(http), end_token_ids=(0,), spell=lambda ids_T: "",
    )  # fmt: skip


@pytest.fixture
def engine(server: Server, tmp_path: Path) -> VllmEngine:
    """Holds version 1."""
    made = connected(server, tmp_path)
    made.load(weights(1))
    return made


def weights(version: int, lineage: str = "run") -> Weights:
    return Weights(lineage, version, iter([("w", torch.full((2,), float(version)))]))


def version_written(engine: VllmEngine) -> int:
    completion = asyncio.run(engine.generate((3, 4), Sampling(1.0, 1), 0))
    return completion.versions[0][1]


# -- an update that fails ---------------------------------------------------------------------------------------------


def load_fails_half_way(server: Server) -> None:
    def update(info: dict[str, Any]) -> None:
        server.refused, server.worker_label, server.model = None, None, "half of each"
        raise ServerError("CUDA out of memory")

    server.update = update


def load_takes_longer_than_the_time_limit(server: Server) -> None:
    def update(info: dict[str, Any]) -> None:
        server.take(info)
        raise ServerError("ReadTimeout")

    server.update = update


def finish_fails(server: Server) -> None:
    def finish(label: str | None) -> None:
        raise ServerError("ReadTimeout")

    server.finish = finish


def update_is_refused(server: Server) -> None:
    def update(info: dict[str, Any]) -> None:
        server.refused = "tensor w is missing"
        raise ServerError("RefusedError")

    server.update = update


def update_does_not_arrive(server: Server) -> None:
    def update(info: dict[str, Any]) -> None:
        raise ServerError("ConnectError")

    server.update = update


@pytest.mark.parametrize("fails", [load_fails_half_way, load_takes_longer_than_the_time_limit, finish_fails])
def test_a_server_that_may_hold_other_weights_than_it_says_stays_paused(
    server: Server, engine: VllmEngine, tmp_path: Path, fails: Callable[[Server], None]
) -> None:
    before = server.label
    fails(server)
    with pytest.raises(ServerError, match="during the sync of version 2"):
        engine.load(weights(2))
    assert (server.model, server.label) != (before, before) and server.label == before  # what it would say is wrong
    assert server.paused
    server.update, server.finish = server.take, server.relabel
    again = connected(server, tmp_path / "again")
    again.load(weights(2))
    assert not server.paused and version_written(again) == 2


@pytest.mark.parametrize("fails", [update_is_refused, update_does_not_arrive])
@pytest.mark.parametrize("loaded", [0, 1])
def test_a_server_that_still_holds_what_it_says_goes_on(
    server: Server, tmp_path: Path, fails: Callable[[Server], None], loaded: int
) -> None:
    engine = connected(server, tmp_path)
    for _ in range(loaded):
        engine.load(weights(1))
    fails(server)
    with pytest.raises(SyncFaultError if fails is update_is_refused else ServerError):
        engine.load(weights(2))
    if loaded:
        assert not server.paused and version_written(engine) == 1
    else:  # nothing of ours is there, so only a server that says so is known to be whole
        assert server.paused == (fails is update_does_not_arrive)


def test_a_server_that_another_run_has_taken_goes_on(server: Server, engine: VllmEngine) -> None:
    def update(info: dict[str, Any]) -> None:
        server.take(info | {"label": "solera/other/5/c0ffee"})
        server.relabel("solera/other/5/c0ffee")

    server.update = update
    with pytest.raises(TakenError, match="another run uses it"):
        engine.load(weights(2))
    assert not server.paused


def test_a_server_that_does_not_say_what_it_holds_stays_paused_and_the_first_error_is_told(
    server: Server, engine: VllmEngine
) -> None:
    post = server.post

    def dying(path: str, body: Any = None, timeout: float | None = None) -> Any:
        if path in ("/update_weights", "/collective_rpc"):
            raise ServerError(f"{path} broke")
        return post(path, body, timeout)

    server.post = dying  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="broke"):
        engine.load(weights(2))
    assert server.paused


@pytest.mark.parametrize("fails", [load_takes_longer_than_the_time_limit, finish_fails, update_is_refused])
def test_weights_that_are_sent_again_in_vain_stay_known(
    server: Server, engine: VllmEngine, fails: Callable[[Server], None]
) -> None:
    """With sync.on_fault = "retry", the version that the server holds is sent a second time."""
    fails(server)
    with pytest.raises(SyncFaultError if fails is update_is_refused else ServerError):
        engine.load(weights(1))
    assert not server.paused and version_written(engine) == 1
    server.update, server.finish = server.take, server.relabel
    assert engine.load(weights(2)).version == 2


@pytest.mark.parametrize("fails", [load_takes_longer_than_the_time_limit, update_is_refused])
def test_weights_that_were_never_finished_are_not_known(
    server: Server, engine: VllmEngine, fails: Callable[[Server], None]
) -> None:
    fails(server)
    with pytest.raises(SyncFaultError if fails is update_is_refused else ServerError):
        engine.load(weights(2))
    assert list(engine.updates.labels.values()) == [("run", 1)]


def test_an_engine_that_was_connected_again_is_not_another_runs(
    server: Server, engine: VllmEngine, tmp_path: Path
) -> None:
    """The server holds what an earlier connection sent when the first update of the new one fails."""
    again = connected(server, tmp_path / "again")
    update_does_not_arrive(server)
    with pytest.raises(ServerError, match="during the sync of version 2"):
        again.load(weights(2))


# -- labels of earlier weights ----------------------------------------------------------------------------------------


def test_labels_of_long_ago_are_forgotten(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "REMEMBERED", 3)
    engine = connected(server, tmp_path)
    said = list[str | None]()
    for version in (1, 2, 3, 4, 3, 5):
        engine.load(weights(version))
        said.append(server.label)
    assert sorted(version for _, version in engine.updates.labels.values()) == [3, 4, 5]
    for label, version in zip(said[3:], (4, 3, 5), strict=True):  # an answer under way may have several of them
        server.label = label
        assert version_written(engine) == version


def test_a_release_that_does_not_label_tokens_writes_with_the_last_weights(server: Server, tmp_path: Path) -> None:
    """vLLM 0.24. After an update that did not come through, nobody knows what it writes with."""
    engine = connected(server, tmp_path, release="0.24")
    for version in (1, 2, 1):
        engine.load(weights(version))
        assert version_written(engine) == version
    server.worker_label, server.update = None, lambda info: None
    assert engine.load(weights(2)).lineage != "run"
    with pytest.raises(GarbageError, match="generated with weights that this run did not send"):
        version_written(engine)


# -- the check of the prefix cache ------------------------------------------------------------------------------------


def drawing(unlike: int, apart: float) -> Callable[[dict[str, Any]], tuple[int, float]]:
    """With the cache, the first `unlike` tokens are others, and log-probabilities are `apart` from those without."""
    seen = list[int]()

    def draw(asked: dict[str, Any]) -> tuple[int, float]:
        if "cache_salt" in asked:
            return 7, -1.0
        seen.append(7 if len(seen) >= unlike else 8)
        return seen[-1], -1.0 - apart

    return draw


@pytest.mark.parametrize("unlike", [0, 1, 4])
def test_a_token_that_rounding_flips_is_no_stale_cache(server: Server, tmp_path: Path, unlike: int) -> None:
    """In bfloat16, with other requests under way, about 1 % of all draws are flipped."""
    engine = connected(server, tmp_path, "torch.bfloat16", block=8)
    server.draw = drawing(unlike, apart=0.1)
    assert engine.load(weights(1)).version == 1
    salts = [asked.get("cache_salt") for asked in server.asked]
    seeds = [asked["sampling_params"]["seed"] for asked in server.asked]
    assert len(salts) == 2 * (unlike + 1) and len(set(salts) - {None}) == len(set(seeds)) == unlike + 1
    assert seeds[::2] == seeds[1::2]
    assert engine.sampled == 0  # what is sampled for a check is not the run's


@pytest.mark.parametrize(("unlike", "apart"), [(10**6, 0.0), (0, 0.3), (3, 0.3)])
def test_a_cache_that_is_stale_is_found_even_where_tokens_agree_by_chance(
    server: Server, tmp_path: Path, unlike: int, apart: float
) -> None:
    engine = connected(server, tmp_path, "torch.bfloat16", block=8)
    server.draw = drawing(unlike, apart)
    with pytest.raises(SyncFaultError, match="its prefix cache still holds older weights"):
        engine.load(weights(1))
    assert len(server.asked) <= 2 * 5
