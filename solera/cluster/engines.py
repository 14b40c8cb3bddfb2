"""Engines as Ray actors, anywhere in the cluster: our own engine with a copy of the model, or a vLLM server.

The controller sends texts to them (`asking.py`). Weights come from the process that has them: the controller, or rank 0
(`sending.py`). What happens when one dies is the business of the pool that they are members of (`engines/pool.py`).
"""

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from solera.cluster.answering import Answering, sampled_by
from solera.cluster.answers import Answers, Request
from solera.cluster.arriving import Arriving
from solera.cluster.asking import Asking
from solera.cluster.bundles import Bundles
from solera.cluster.connection import CONNECTION, address_of_node, need_ray
from solera.cluster.passing import Message, divided, unpacked
from solera.cluster.sending import Receiver, Sender, engine_errors
from solera.config import InFlight, Transport
from solera.engines.faults import EngineError
from solera.engines.groups import MeetingPoint, TensorGroup, gpu_of
from solera.engines.in_process import InProcessEngine
from solera.engines.member import Member, Opened
from solera.engines.messages import joined, parted
from solera.engines.pool import CHECKING, EnginePool, Outcome, Published, of_each
from solera.engines.vllm.client import VllmEngine
from solera.errors import SoleraError, counted, one_line
from solera.models.loading import Source
from solera.models.small import suit
from solera.protocols import Courier, Weights, Work
from solera.records import Completion, Manifest, Sampling, TensorSpec
from solera.sharded.rank import STARTING

AHEAD = 8
"""For so many slots, one more request waits in the actor of a continuous decoder. A free slot would otherwise wait
until the controller has the answer and sends another request."""
CLOSING = 15.0
"""Seconds in which an engine must end its server."""


class Spec(Protocol):
    """What an actor must know to make its engine. `servers.py` has another one."""

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
    ahead: int
    """Requests that it takes beyond its slots."""
    gpu: str
    """Where it computes (`gpu_of`)."""


def ahead_of(engine: InProcessEngine | VllmEngine) -> int:
    """How many requests may wait in the actor. Plain decoding would begin with the rest of a burst only when it is
    idle, and a server would have to drain them at a sync."""
    return engine.slots // AHEAD if isinstance(engine, InProcessEngine) and engine.model.takes_plans else 0


class Answer(NamedTuple):
    """What the engine did so far, and, after a sync, what it holds or why the sync failed."""

    sampled: int
    work: Work
    held: Manifest | SoleraError | None = None


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
        self._arriving = Arriving()
        self._loading: asyncio.Future[Manifest] | None = None
        self._groups: dict[str, TensorGroup] = {}
        """In which the controller and rank 0 send tensors, by the senders' names for them."""

    async def open(self, spec: Spec, number: int) -> Hello | SoleraError:
        """Returns why the engine cannot be made, if it cannot: Ray would wrap an error that is raised."""
        try:
            self.engine = await asyncio.to_thread(spec.open, number)
            self._answering = Answering(self.engine, spec.shares_gpu)
        except SoleraError as error:
            return error
        ray = need_ray()
        node_id = ray.get_runtime_context().get_node_id()
        gpu = gpu_of(self.engine.model.device) if isinstance(self.engine, InProcessEngine) else ""
        self._address = address_of_node(ray)
        dtype, slots, ahead = self.engine.dtype, self.engine.slots, ahead_of(self.engine)
        return Hello(self._address, node_id, os.getpid(), dtype, slots, ahead, gpu)

    async def meet(self, key: str, host: str, port: int, on_gpu: bool, timeout: float) -> SoleraError | None:
        """Join a group of a sender and this engine. Returns why that is not possible, or `None`."""
        try:
            self._groups[key] = await asyncio.to_thread(self._meet, key, host, port, on_gpu, timeout)
        except SoleraError as error:
            return error
        return None

    def _meet(self, key: str, host: str, port: int, on_gpu: bool, timeout: float) -> TensorGroup:
        if key in self._groups:
            self._groups.pop(key).close()
        device = (
            self.engine.model.device if on_gpu and isinstance(self.engine, InProcessEngine) else torch.device("cpu")
        )
        return TensorGroup(MeetingPoint(host, timeout, port), 1, 2, device, self._address)

    async def ask(self, requests: Sequence[Request], cancelled: Sequence[int]) -> None:
        """Begin with these requests, and give up others. Does not wait for them."""
        self._answering.ask(requests, cancelled)

    async def answers(self) -> Answers:
        """Wait until some requests are answered."""
        return await self._answering.answers()

    async def begin(self, lineage: str, version: int, in_flight: InFlight) -> None:
        """Load the weights that `take` brings next."""
        await self.drop()  # an engine whose last weights did not come to their end would wait for them
        self._arriving = Arriving()
        weights = Weights(lineage, version, iter(self._arriving))
        self._loading = asyncio.ensure_future(asyncio.to_thread(self.engine.load, weights, in_flight))

    async def take(self, message: Message) -> SoleraError | None:
        """Some tensors. Returns when they have been copied, or when loading has failed. If they did not arrive, returns
        why."""
        assert self._loading is not None, "begin comes first"
        try:
            whole_N = await asyncio.to_thread(unpacked, message.sent, self._groups)
        except SoleraError as error:
            return error
        if self._loading.done():  # it has failed, and nobody takes them
            return None
        copied = asyncio.wrap_future(self._arriving.put(parted(message.parts, whole_N)))
        either: list[asyncio.Future[Any]] = [copied, self._loading]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return None

    async def drop(self) -> None:
        """The rest of the weights does not come."""
        self._arriving.end(EngineError("the weights did not come to their end"))

    async def finish(self) -> Answer:
        """What the engine holds now."""
        assert self._loading is not None, "begin comes first"
        self._arriving.end()
        held: Manifest | SoleraError
        try:
            held = await self._loading
        except SoleraError as error:
            held = error
        return Answer(sampled_by(self.engine), self.engine.work, held)

    async def did(self) -> Answer:
        """Asks a server how much it has sampled."""
        return Answer(await asyncio.to_thread(lambda: self.engine.sampled), self.engine.work)

    async def close(self) -> None:
        """End a server. It would also end by itself after this process."""
        await asyncio.to_thread(self.engine.close)


class RemoteEngine:
    """The controller's side of an engine that is a Ray actor. `timeout` is how long a call may take; requests have a
    limit of their own, from the pool."""

    def __init__(
        self, ray: Any, actor: Any, hello: Hello, timeout: float, sampled: Sampled, transport: Transport = "auto"
    ) -> None:
        self._ray, self._actor, self._timeout, self._sampled = ray, actor, timeout, sampled
        self._hello = hello
        self.place = f"process {hello.pid} on {hello.node}"
        self.receiver = Receiver(uuid.uuid4().hex, actor, hello.gpu, self.place, transport, timeout)
        self.sender = Sender(self.receiver, address_of_node(ray))
        """Sends what this process has."""
        self.dtype, self.slots = hello.dtype, hello.slots
        self.held = Manifest("", 0, ())
        self.work = Work()
        self._asking = Asking(actor, self.place, timeout, self._learn)
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
            did: Answer = self._get(self._actor.did.remote(), min(self._timeout, CHECKING))
            self._learn(did.sampled, did.work)
        return self._sampled.raise_to(self, 0)

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        return await self._asking.ask(token_ids, sampling, seed)

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        """Send the weights from this process, each message when the one before it has been copied."""
        self.begin(weights.lineage, weights.version, in_flight)
        for tensors in divided(weights.tensors):
            with self._calling():
                self.sender.send(joined(tensors))
        return self.finish()

    def begin(self, lineage: str, version: int, in_flight: InFlight) -> None:
        """Somebody sends weights to the `receiver` now. `finish` or `drop` follows."""
        self._get(self._actor.begin.remote(lineage, version, in_flight))

    def finish(self) -> Manifest:
        """All weights have been sent."""
        did: Answer = self._get(self._actor.finish.remote())
        self._learn(did.sampled, did.work)
        if not isinstance(did.held, Manifest):
            raise did.held or EngineError("it did not say what it holds")
        self.held = did.held
        return self.held

    def drop(self) -> None:
        """The rest of the weights does not come. Does not wait for the engine."""
        with suppress(self._ray.exceptions.RayError):
            self._actor.drop.remote()

    def missed(self) -> None:
        """It did not take what another process sent."""
        self._silent = True

    def weights(self) -> Weights:
        """The weights are in the actor. The pool keeps a copy of those that it published."""
        return Weights(self.held.lineage, self.held.version, iter(()))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._asking.close()
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

    def _learn(self, sampled: int, work: Work) -> None:
        self.work = work
        self._sampled.raise_to(self, sampled)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call that the engine must answer."""
        self._silent = True
        with engine_errors(self.place, self._timeout):
            yield
        self._silent = False


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

    def _publish(
        self, weights: Weights, members: Sequence[Member], in_flight: InFlight
    ) -> tuple[Published, dict[Member, Outcome]]:
        """If another process has the weights, it sends them to the engines. This one keeps a copy."""
        if weights.courier is None:
            return super()._publish(weights, members, in_flight)
        begun = of_each(members, lambda each: _remote(each).begin(weights.lineage, weights.version, in_flight))
        failed: dict[Member, Outcome] = {member: error for member, error in begun.items() if error is not None}
        try:
            new = _passed_on(weights, weights.courier, members, failed)
        except BaseException:
            for member in members:
                _remote(member).drop()
            raise
        for member in failed:
            self._doubt(member)
        left = [member for member in members if member not in failed]
        return new, failed | of_each(left, lambda each: self._watched(each, new, lambda one: _remote(one).finish()))

    def close(self) -> None:
        super().close()
        self._starting.end(need_ray())
        self.wait_for_threads(CHECKING)  # Ray ends a process whose threads call it after its end
        self._leave()

    def _leave(self) -> None:
        if self._bundles is not None:
            self._bundles.leave()
        CONNECTION.leave()


def _passed_on(
    weights: Weights, courier: Courier, members: Sequence[Member], failed: dict[Member, Outcome]
) -> Published:
    """Let the courier send the weights to engines that have begun to load. Adds those that fail to `failed`."""
    tensors, specs = dict[str, Any](), list[TensorSpec]()
    for gathered in courier.gather():
        tensors |= gathered.tensors
        specs += gathered.specs
        if left := [member for member in members if member not in failed]:
            errors = courier.send([_remote(member).receiver for member in left])
            for member, error in zip(left, errors, strict=True):
                if error is not None:
                    _remote(member).missed()
                    failed[member] = error
    return Published(Manifest(weights.lineage, weights.version, tuple(specs)), tensors)


def _remote(member: Member) -> RemoteEngine:
    assert isinstance(member.engine, RemoteEngine)
    return member.engine


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
        where = bundles.for_engine(number) if bundles is not None else "SPREAD"
        made = ray.remote(EngineActor).options(num_cpus=1, num_gpus=spec.gpus, scheduling_strategy=where)
        actor = made.remote()
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
    return Opened(f"engine {number} ({engine.place})", engine, hello.ahead)


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
