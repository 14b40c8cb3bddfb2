"""How the controller sends weights to one engine. `EngineActor.meet` and `take` are the other end."""

import time
from concurrent import futures
from typing import Any

import torch
from torch import Tensor

from solera.cluster.passing import Announced, Way, packed, way
from solera.config import Transport
from solera.engines.faults import EngineError
from solera.engines.groups import MeetingPoint, TensorGroup, begin, gpu_of
from solera.errors import SoleraError


class Sender:
    """Sends tensors to an actor that computes on `gpu` (`gpu_of`). `host` is the address of this machine. No step takes
    longer than `timeout` seconds."""

    def __init__(self, actor: Any, gpu: str, transport: Transport, host: str, timeout: float) -> None:
        self._actor, self._gpu, self.transport, self._host, self._timeout = actor, gpu, transport, host, timeout
        self.group: TensorGroup | None = None
        """Of this process and the actor only: if the actor dies, no other engine loses its group."""

    def way(self, tensor: Tensor) -> Way:
        """How this tensor would be sent."""
        return way(self.transport, gpu_of(tensor.device), self._gpu)

    def send(self, name: str, tensor: Tensor) -> None:
        """Returns when the actor has taken the tensor."""
        how = self.way(tensor)
        sent = packed(tensor, how)
        if not isinstance(sent, Announced):
            self._await(self._actor.take.remote(name, sent).future())
            return
        device = tensor.device if how == "nccl" else torch.device("cpu")
        if self.group is None or self.group.device != device:
            self.close()
            self.group = self._meet(device)
        group, whole = self.group, tensor.detach().to(device).contiguous()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # a thread does not wait for our stream
        ours = begin(lambda: group.broadcast(whole))
        self._await(self._actor.take.remote(name, sent).future(), ours)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None

    def _meet(self, device: torch.device) -> TensorGroup:
        """Make a group with the actor, which must reach a port of this machine."""
        point = MeetingPoint(self._host, self._timeout)
        ours = begin(lambda: TensorGroup(point, 0, 2, device, self._host))
        asked = self._actor.meet.remote(self._host, point.port, device.type == "cuda", self._timeout)
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
        deadline, left = time.monotonic() + self._timeout, set(parts)
        while left:
            ended, left = futures.wait(left, deadline - time.monotonic(), futures.FIRST_COMPLETED)
            if not ended:
                raise EngineError(f"no answer within {self._timeout:g} s (engine.timeout)")
            for part in ended:
                if isinstance(result := part.result(), SoleraError):
                    raise result
