"""Engines as Ray actors, anywhere in the cluster: our own engine with a copy of the model, or a vLLM server.

The controller sends texts to them, and weights one tensor at a time (`passing.py`). What happens when one dies is the
business of the pool that they are members of (`engines/pool.py`).
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
from typing import Any, NamedTuple, Protocol

import torch

from solera.cluster.bundles import Bundles
from solera.cluster.connection import CONNECTION, address_of_node, need_ray
from solera.cluster.passing import Sent, unpacked
from solera.cluster.sending import Sender
from solera.config import InFlight, Transport
from solera.engines.faults import EngineError
from solera.engines.groups import MeetingPoint, TensorGroup, gpu_of
from solera.engines.in_process import InProcessEngine
from solera.engines.member import Opened
from solera.engines.pool import CHECKING, EnginePool
from solera.engines.vllm.client import VllmEngine
from solera.errors import SoleraError, counted, one_line
from solera.models.loading import Source
from solera.models.small import suit
from solera.protocols import Weights, Work
from solera.records import Completion, Manifest, Sampling
from solera.sharded.rank import STARTING

CLOSING = 15.0
"""Seconds in which an engine must end its server."""


class Spec(Protocol):
    """What an actor must know to make its engine. `servers.py` has another one."""

    @property
    def max_rows(self) -> int:
        """Requests that the engine may have at once."""
        ...

    @property
    def starting(self) -> float:
        """Seconds in which the actor must be ready."""
        ...

    @property
    def gpus(self) -> float:
        """What Ray gives the actor, besides a CPU."""
        ...

    @property
    def shares_gpu(self) -> bool:
        """Whether the engine must free its memory whenever it has nothing to write."""
        ...

    def open(self, number: int) -> InProcessEngine | VllmEngine:
        """Make engine `number`, inside the actor."""
        ...


@dataclass(frozen=True)
class EngineSpec:
    """Our own engine."""

    source: Source
    compute: torch.dtype
    max_rows: int
    threads: int
    device: str = "cpu"
    gpus: float = 0.0
    """What Ray gives the actor."""
    compiled: bool = False
    starting = STARTING

    @property
    def shares_gpu(self) -> bool:
        return 0 < self.gpus < 1

    def open(self, number: int) -> InProcessEngine:
        torch.set_num_threads(self.threads)
        model, codec = self.source.load(torch.device(self.device))
        suit(model.module)
        return InProcessEngine(
            model.for_compute(self.compute, copied=True), codec.end_token_ids, self.max_rows, self.compute,
            self.compiled, early=True, spell=codec.decode,
        )  # fmt: skip


class Hello(NamedTuple):
    """What an engine says when it is ready."""

    node: str
    node_id: str
    pid: int
    dtype: str
    slots: int
    gpu: str
    """Where it computes (`gpu_of`)."""


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

    def __init__(self) -> None:
        self._tensors: Queue[tuple[str, Any] | None] = Queue(1)
        self._loading: asyncio.Future[Manifest] | None = None
        self._group: TensorGroup | None = None
        """In which the controller sends tensors."""

    async def open(self, spec: Spec, number: int) -> Hello | SoleraError:
        """Returns why the engine cannot be made, if it cannot: Ray would wrap an error that is raised."""
        try:
            self.engine = await asyncio.to_thread(spec.open, number)
            self._frees, self._writing = spec.shares_gpu, 0
        except SoleraError as error:
            return error
        ray = need_ray()
        node_id = ray.get_runtime_context().get_node_id()
        gpu = gpu_of(self.engine.model.device) if isinstance(self.engine, InProcessEngine) else ""
        self._address = address_of_node(ray)
        return Hello(self._address, node_id, os.getpid(), self.engine.dtype, self.engine.slots, gpu)

    async def meet(self, host: str, port: int, on_gpu: bool, timeout: float) -> SoleraError | None:
        """Join a group of the controller and this engine. Returns why that is not possible, or `None`."""
        try:
            self._group = await asyncio.to_thread(self._meet, host, port, on_gpu, timeout)
        except SoleraError as error:
            return error
        return None

    def _meet(self, host: str, port: int, on_gpu: bool, timeout: float) -> TensorGroup:
        if self._group is not None:
            self._group.close()
        device = (
            self.engine.model.device if on_gpu and isinstance(self.engine, InProcessEngine) else torch.device("cpu")
        )
        return TensorGroup(MeetingPoint(host, timeout, port), 1, 2, device, self._address)

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Answer:
        self._writing += 1
        try:
            return await self._answer(self.engine.generate(token_ids, sampling, seed))
        finally:
            self._writing -= 1
            if self._frees and not self._writing and isinstance(self.engine, InProcessEngine):
                await asyncio.to_thread(self.engine.free)

    async def begin(self, lineage: str, version: int, in_flight: InFlight) -> None:
        """Load the weights that `take` brings next."""
        self._tensors = Queue(1)  # another one may hold what an engine refused
        weights = Weights(lineage, version, iter(self._tensors.get, None))
        self._loading = asyncio.ensure_future(asyncio.to_thread(self.engine.load, weights, in_flight))

    async def take(self, name: str, sent: Sent) -> SoleraError | None:
        """One tensor. Returns when the one before it has been copied, or when loading has failed. If the tensor did not
        arrive, returns why."""
        assert self._loading is not None, "begin comes first"
        try:
            tensor = await asyncio.to_thread(unpacked, sent, self._group)
        except SoleraError as error:
            return error
        if self._loading.done():  # it has failed, and nobody empties the queue
            return None
        put = asyncio.ensure_future(asyncio.to_thread(self._tensors.put, (name, tensor)))
        either: list[asyncio.Future[Any]] = [put, self._loading]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return None

    async def finish(self) -> Answer:
        """What the engine holds now."""
        assert self._loading is not None, "begin comes first"
        if not self._loading.done():
            await asyncio.to_thread(self._tensors.put, None)
        return await self._answer(self._loading)

    async def did(self) -> Answer:
        """Asks a server how much it has sampled."""
        return Answer(None, None, await asyncio.to_thread(lambda: self.engine.sampled), self.engine.work)

    async def close(self) -> None:
        """End a server. It would also end by itself after this process."""
        await asyncio.to_thread(self.engine.close)

    async def _answer(self, awaited: Any) -> Answer:
        result, failed = None, None
        try:
            result = await awaited
        except SoleraError as error:
            failed = error
        engine = self.engine  # a server is not asked after each response
        sampled = engine.sampled if isinstance(engine, InProcessEngine) else engine.work.tokens
        return Answer(result, failed, sampled, engine.work)


class RemoteEngine:
    """The controller's side of an engine that is a Ray actor. `timeout` is how long a call may take; requests have a
    limit of their own, from the pool."""

    def __init__(
        self, ray: Any, actor: Any, hello: Hello, timeout: float, sampled: Sampled, transport: Transport = "auto"
    ) -> None:
        self._ray, self._actor, self._timeout, self._sampled = ray, actor, timeout, sampled
        self._hello = hello
        self.sender = Sender(actor, hello.gpu, transport, address_of_node(ray), timeout)
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
            with self._calling():
                self.sender.send(name, tensor)
        self.held = self._learn_of(self._get(self._actor.finish.remote()))
        return self.held

    def weights(self) -> Weights:
        """The weights are in the actor. The pool keeps a copy of those that it published."""
        return Weights(self.held.lineage, self.held.version, iter(()))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sender.close()
            with suppress(self._ray.exceptions.RayError):  # Ray may have ended
                if not self._silent:
                    self._ray.wait([self._actor.close.remote()], timeout=CLOSING)
                self._ray.kill(self._actor)
                if self._silent:
                    _kill_there(self._ray, self._hello)

    def _get(self, asked: Any, timeout: float | None = None) -> Any:
        with self._calling():
            return self._ray.get(asked, timeout=timeout or self._timeout)

    def _learn_of(self, answer: Answer) -> Any:
        self.work = answer.work
        self._sampled.raise_to(self, answer.sampled)
        if answer.error is not None:
            raise answer.error
        return answer.result

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call that the engine must answer."""
        self._silent = True
        with self._failing():
            yield
        self._silent = False

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
    `cpus` or more. `bundles` are those of the ranks; an engine that has a place there takes it."""

    def __init__(
        self, spec: Spec, count: int, *, cpus: int, address: str | None, timeout: float,
        tell: Callable[[int], None], say: Callable[[str], None], transport: Transport = "auto",
        bundles: Bundles | None = None,
    ) -> None:  # fmt: skip
        # Not in the threads that open the engines: what Ray starts ends together with the thread that started it.
        CONNECTION.join(cpus, address)
        sampled, self._starting, self._bundles = Sampled(tell), Starting(), bundles
        opens = [
            partial(open_engine, spec, number, timeout, sampled, self._starting, transport, bundles)
            for number in range(count)
        ]
        if bundles is not None:
            bundles.join()
        try:
            super().__init__(opens, timeout=timeout, say=say)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        super().close()
        self._starting.end(need_ray())
        self.wait_for_threads(CHECKING)  # Ray ends a process whose threads call it after its end
        self._leave()

    def _leave(self) -> None:
        if self._bundles is not None:
            self._bundles.leave()
        CONNECTION.leave()


class Starting:
    """The actors that threads wait for until they have started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actors: list[Any] = []
        self._ended = False

    @contextmanager
    def watching(self, actor: Any) -> Iterator[None]:
        with self._lock:
            if self._ended:
                raise EngineError("the engines are closed")
            self._actors.append(actor)
        try:
            yield
        finally:
            with self._lock:
                self._actors.remove(actor)

    def end(self, ray: Any) -> None:
        """Kill them, so that nobody waits for them any more."""
        with self._lock:
            self._ended = True
            for actor in self._actors:
                with suppress(ray.exceptions.RayError):  # Ray may have ended
                    ray.kill(actor)


def open_engine(
    spec: Spec, number: int, timeout: float, sampled: Sampled, starting: Starting, transport: Transport,
    bundles: Bundles | None,
) -> Opened:  # fmt: skip
    """Start an engine in its place in `bundles`. If it has none, start it on any free CPU, on another machine than the
    last one if possible."""
    ray, actor = need_ray(), None
    try:
        made, at_once = ray.remote(EngineActor), max(1000, 2 * spec.max_rows)
        where = bundles.for_engine(number) if bundles is not None else "SPREAD"
        actor = made.options(
            num_cpus=1, num_gpus=spec.gpus, scheduling_strategy=where, max_concurrency=at_once
        ).remote()
        with starting.watching(actor):
            hello = ray.get(actor.open.remote(spec, number), timeout=spec.starting)
        if isinstance(hello, SoleraError):
            raise hello
    except BaseException as error:
        said = _why_not(ray, number, error, spec)
        if actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        raise (error if said is None else EngineError(said)) from error
    engine = RemoteEngine(ray, actor, hello, timeout, sampled, transport)
    return Opened(f"engine {number} ({engine.place})", engine)


def _why_not(ray: Any, number: int, error: BaseException, spec: Spec) -> str | None:
    """Why an engine did not start, if it is Ray that says so."""
    if isinstance(error, ray.exceptions.GetTimeoutError):
        free = ray.available_resources()
        needs, has = "one CPU", counted(int(free.get("CPU", 0)), "free CPU")
        if spec.gpus:
            needs, has = f"{needs} and {spec.gpus:g} GPU", f"{has} and {free.get('GPU', 0):g} of its GPUs free"
        return (
            f"cluster.engines: engine {number} did not start within {spec.starting:g} s. Each needs {needs}, and the "
            f"Ray cluster has {has}"
        )
    if isinstance(error, ray.exceptions.RayError):
        return f"cluster.engines: engine {number} cannot start: {one_line(error)}"
    return None
