"""How a process that has weights sends them to engines: the controller, or rank 0. `EngineActor.meet` and `take` are
the other end."""

import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solera.cluster.connection import address_of_node, need_ray
from solera.cluster.passing import Announced, Message, Way, packed, way
from solera.config import Transport
from solera.engines.faults import EngineError
from solera.engines.groups import MeetingPoint, TensorGroup, begin, gpu_of
from solera.engines.messages import Joined
from solera.errors import SoleraError


class Receiver(NamedTuple):
    """An engine in an actor, as those who send to it know it."""

    key: str
    """No other engine ever has the same."""
    actor: Any
    gpu: str
    """Where it computes (`gpu_of`)."""
    place: str
    """In words."""
    transport: Transport
    timeout: float
    """No step takes more seconds."""


class Sender:
    """Sends tensors to an engine. `host` is the address of this machine."""

    def __init__(self, to: Receiver, host: str) -> None:
        self._to, self._host, self.transport = to, host, to.transport
        self._key = uuid.uuid4().hex
        self.group: TensorGroup | None = None
        """Of this process and the actor only: if the actor dies, no other engine loses its group."""

    def way(self, tensor: Tensor) -> Way:
        """How this tensor would be sent."""
        return way(self.transport, gpu_of(tensor.device), self._to.gpu)

    def send(self, tensors: Joined) -> None:
        """Returns when the engine has copied the tensors."""
        with engine_errors(self._to.place, self._to.timeout):
            self._send(tensors)

    def _send(self, tensors: Joined) -> None:
        how = self.way(tensors.whole_N)
        message = Message(tensors.parts, packed(tensors.whole_N, how, self._key))
        if not isinstance(message.sent, Announced):
            self._await(self._to.actor.take.remote(message).future())
            return
        device = tensors.whole_N.device if how == "nccl" else torch.device("cpu")
        if self.group is None or self.group.device != device:
            self.close()
            self.group = self._meet(device)
        group, whole_N = self.group, tensors.whole_N.to(device)
        if tensors.whole_N.is_cuda:
            torch.cuda.current_stream(tensors.whole_N.device).synchronize()  # a thread does not wait for our stream
        ours = begin(lambda: group.broadcast(whole_N))
        self._await(self._to.actor.take.remote(message).future(), ours)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None

    def _meet(self, device: torch.device) -> TensorGroup:
        """Make a group with the actor, which must reach a port of this machine."""
        timeout = self._to.timeout
        point = MeetingPoint(self._host, timeout)
        ours = begin(lambda: TensorGroup(point, 0, 2, device, self._host))
        asked = self._to.actor.meet.remote(self._key, self._host, point.port, device.type == "cuda", timeout)
        try:
            self._await(asked.future(), ours)
        except EngineError as error:
            raise EngineError(
                f"it did not join a process group at {self._host}, port {point.port}: {error}. If it cannot reach this "
                "port, use sync.transport = store"
            ) from error
        return ours.result()

    def _await(self, *parts: "futures.Future[Any]") -> None:
        """Wait for the actor's part and ours. Whichever fails first ends the waiting. Our part may then go on in its
        thread until its own time limit."""
        deadline, left = time.monotonic() + self._to.timeout, set(parts)
        while left:
            ended, left = futures.wait(left, deadline - time.monotonic(), futures.FIRST_COMPLETED)
            if not ended:
                raise EngineError(f"no answer within {self._to.timeout:g} s (engine.timeout)")
            for part in ended:
                if isinstance(result := part.result(), SoleraError):
                    raise result


class Senders:
    """Sends to several engines at once. An engine that fails costs only itself."""

    def __init__(self) -> None:
        self._host = address_of_node(need_ray())
        self._senders: dict[str, Sender] = {}

    def send(self, tensors: Joined, receivers: Sequence[Receiver]) -> list[SoleraError | None]:
        """Returns what was wrong with each engine, when all have copied the tensors or failed."""
        for gone in self._senders.keys() - {each.key for each in receivers}:
            begin(self._senders.pop(gone).close)  # which may take seconds
        senders = [self._senders.setdefault(each.key, Sender(each, self._host)) for each in receivers]
        return [sent.result() for sent in [begin(partial(_sent, sender, tensors)) for sender in senders]]


def _sent(sender: Sender, tensors: Joined) -> SoleraError | None:
    """Returns the engine's error. Others are raised."""
    try:
        sender.send(tensors)
    except SoleraError as error:
        return error
    return None


@contextmanager
def engine_errors(place: str, timeout: float) -> Iterator[None]:
    """Ray's errors are those of the engine at `place`."""
    errors = need_ray().exceptions
    try:
        yield
    except errors.GetTimeoutError:
        raise EngineError(f"no answer within {timeout:g} s (engine.timeout)") from None
    except errors.RayError as error:
        raise EngineError(f"died or cannot be reached ({type(error).__name__}; {place})") from error
