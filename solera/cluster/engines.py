"""Engines as Ray actors: our own engine, each with a copy of the model, anywhere in the cluster.

The controller sends texts to them, and weights one tensor at a time through Ray's object store. What happens when one
dies is the business of the pool that they are members of (`engines/pool.py`).
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Queue
from typing import Any, NamedTuple

import torch

from solera.cluster.connection import CONNECTION, address_of_node, need_ray
from solera.config import InFlight
from solera.engines.faults import EngineError
from solera.engines.in_process import InProcessEngine
from solera.engines.member import Opened
from solera.engines.pool import CHECKING, EnginePool
from solera.errors import SoleraError, counted, one_line
from solera.models.loading import Source
from solera.protocols import Weights, Work
from solera.records import Completion, Manifest, Sampling
from solera.sharded.rank import STARTING


@dataclass(frozen=True)
class EngineSpec:
    """What an actor must know to make its engine."""

    source: Source
    compute: torch.dtype
    max_rows: int
    threads: int


class Hello(NamedTuple):
    """What an engine says when it is ready."""

    node: str
    node_id: str
    pid: int
    dtype: str
    slots: int


class Answer(NamedTuple):
    """What a request or a sync brought: a result, or an error with a message. Also what the engine did so far."""

    result: Any
    error: SoleraError | None
    sampled: int
    work: Work


class Sampled:
    """What all engines are known to have sampled, those that died included. `tell` is told the sum when it grows."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._of: dict[object, int] = {}
        self._lock = threading.Lock()

    def raise_to(self, engine: object, tokens: int) -> int:
        """Returns what this engine has sampled."""
        with self._lock:
            self._of[engine] = max(tokens, self._of.get(engine, 0))
            self._tell(sum(self._of.values()))
            return self._of[engine]


class EngineActor:
    """What runs inside a Ray actor. Its methods run in one event loop, except for the loading of weights."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.threads)
        model, codec = spec.source.load(torch.device("cpu"))
        self.engine = InProcessEngine(
            model.for_compute(spec.compute, copied=True), codec.end_token_ids, spec.max_rows, spec.compute, early=True,
            spell=codec.decode,
        )  # fmt: skip
        self._tensors: Queue[tuple[str, Any] | None] = Queue(1)
        self._loading: asyncio.Future[Manifest] | None = None

    async def hello(self) -> Hello:
        ray, engine = need_ray(), self.engine
        node_id = ray.get_runtime_context().get_node_id()
        return Hello(address_of_node(ray), node_id, os.getpid(), engine.dtype, engine.slots)

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Answer:
        return await self._answer(self.engine.generate(token_ids, sampling, seed))

    async def begin(self, lineage: str, version: int, in_flight: InFlight) -> None:
        """Load the weights that `take` brings next."""
        weights = Weights(lineage, version, iter(self._tensors.get, None))
        self._loading = asyncio.ensure_future(asyncio.to_thread(self.engine.load, weights, in_flight))

    async def take(self, name: str, tensor: Any) -> None:
        """One tensor. Returns when the one before it has been copied, or when loading has failed."""
        assert self._loading is not None, "begin comes first"
        put = asyncio.ensure_future(asyncio.to_thread(self._tensors.put, (name, tensor)))
        either: list[asyncio.Future[Any]] = [put, self._loading]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self) -> Answer:
        """What the engine holds now."""
        assert self._loading is not None, "begin comes first"
        if not self._loading.done():
            await asyncio.to_thread(self._tensors.put, None)
        return await self._answer(self._loading)

    async def did(self) -> Answer:
        return Answer(None, None, self.engine.sampled, self.engine.work)

    async def _answer(self, awaited: Any) -> Answer:
        result, failed = None, None
        try:
            result = await awaited
        except SoleraError as error:
            failed = error
        return Answer(result, failed, self.engine.sampled, self.engine.work)


class RemoteEngine:
    """The controller's side of an engine that is a Ray actor. `timeout` is how long a call may take; requests have a
    limit of their own, from the pool."""

    def __init__(self, ray: Any, actor: Any, hello: Hello, timeout: float, sampled: Sampled) -> None:
        self._ray, self._actor, self._timeout, self._sampled = ray, actor, timeout, sampled
        self._hello = hello
        self.place = f"process {hello.pid} on {hello.node}"
        self.dtype, self.slots = hello.dtype, hello.slots
        self.held = Manifest("", 0, ())
        self.work = Work()
        self._silent = False
        """Whether it did not answer the last call."""
        self._closed = False

    @property
    def version(self) -> int:
        return self.held.version

    @property
    def sampled(self) -> int:
        """Asks the engine. What an engine sampled that died since it answered last is not known."""
        with suppress(EngineError):
            self._learn_of(self._get(self._actor.did.remote(), min(self._timeout, CHECKING)))
        return self._sampled.raise_to(self, 0)

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        asked = self._actor.generate.remote(token_ids, sampling, seed)
        try:
            with self._failing():
                answer = await asyncio.wrap_future(asked.future())
        except asyncio.CancelledError:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(asked)
            raise
        return self._learn_of(answer)

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        """Send the weights, each tensor when the one before it has been taken."""
        self._get(self._actor.begin.remote(weights.lineage, weights.version, in_flight))
        for name, tensor in weights.tensors:
            self._get(self._actor.take.remote(name, tensor.detach().cpu()))
        self.held = self._learn_of(self._get(self._actor.finish.remote()))
        return self.held

    def weights(self) -> Weights:
        """The weights are in the actor. The pool keeps a copy of those that it published."""
        return Weights(self.held.lineage, self.held.version, iter(()))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(self._ray.exceptions.RayError):  # Ray may have ended
                self._ray.kill(self._actor)
                if self._silent:
                    _kill_there(self._ray, self._hello)

    def _get(self, asked: Any, timeout: float | None = None) -> Any:
        self._silent = True
        with self._failing():
            found = self._ray.get(asked, timeout=timeout or self._timeout)
        self._silent = False
        return found

    def _learn_of(self, answer: Answer) -> Any:
        self.work = answer.work
        self._sampled.raise_to(self, answer.sampled)
        if answer.error is not None:
            raise answer.error
        return answer.result

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Ray's errors are this engine's own."""
        try:
            yield
        except self._ray.exceptions.GetTimeoutError:
            raise EngineError(f"no answer within {self._timeout:g} s (engine.timeout)") from None
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"died or cannot be reached ({type(error).__name__}; {self.place})") from error


def _kill_there(ray: Any, hello: Hello) -> None:
    """End a process that was stopped: it does not hear Ray, and its CPU would stay taken."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(hello.node_id, soft=False)
    ray.get(ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(hello.pid), timeout=CHECKING)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class ActorPool(EnginePool):
    """`count` engines in actors. `tell` is told what all of them have sampled so far. If Ray is started here, it gets
    `cpus` or more."""

    def __init__(
        self, spec: EngineSpec, count: int, *, cpus: int, address: str | None, timeout: float,
        tell: Callable[[int], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        # Not in the threads that open the engines: what Ray starts ends together with the thread that started it.
        CONNECTION.join(cpus, address)
        sampled = Sampled(tell)
        opens = [partial(open_engine, spec, number, timeout, sampled) for number in range(count)]
        try:
            super().__init__(opens, timeout=timeout, say=say)
        except BaseException:
            CONNECTION.leave()
            raise

    def close(self) -> None:
        super().close()
        CONNECTION.leave()


def open_engine(spec: EngineSpec, number: int, timeout: float, sampled: Sampled) -> Opened:
    """Start an engine on a free CPU of the cluster, on another machine than the last one if possible."""
    ray, actor = need_ray(), None
    try:
        made = ray.remote(EngineActor)
        at_once = max(1000, 2 * spec.max_rows)
        actor = made.options(num_cpus=1, scheduling_strategy="SPREAD", max_concurrency=at_once).remote(spec)
        hello = ray.get(actor.hello.remote(), timeout=STARTING)
    except BaseException as error:
        said = _why_not(ray, number, error)
        if actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        raise (error if said is None else EngineError(said)) from error
    engine = RemoteEngine(ray, actor, hello, timeout, sampled)
    return Opened(f"engine {number} ({engine.place})", engine)


def _why_not(ray: Any, number: int, error: BaseException) -> str | None:
    """Why an engine did not start, if it is Ray that says so."""
    if isinstance(error, ray.exceptions.GetTimeoutError):
        free = counted(int(ray.available_resources().get("CPU", 0)), "free CPU")
        return (
            f"cluster.engines: engine {number} did not start within {STARTING:g} s. Each needs one CPU, and the Ray "
            f"cluster has {free}"
        )
    if isinstance(error, ray.exceptions.RayError):
        return f"cluster.engines: engine {number} cannot start: {one_line(error)}"
    return None
