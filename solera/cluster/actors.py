"""Ranks as Ray actors, one in each bundle of a placement group.

Ray ends the actors when the controller dies. If Solera started Ray, Ray ends as well.
"""

import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from solera.cluster.bundles import Beside, Bundles
from solera.cluster.connection import CONNECTION, address_of_node, need_ray
from solera.cluster.sending import Receiver, Senders
from solera.errors import SoleraError, one_line
from solera.sharded.rank import Seat
from solera.sharded.ranks import BEAT, Reply, Served, answer

PULSE, PASSING = "pulse", "passing"
"""The concurrency groups of `Actor.pulse` and `Actor.pass_on`."""


class Place(NamedTuple):
    """Where an actor runs, and a port that was free there."""

    node: str
    pid: int
    port: int


class Actor:
    """What runs inside a Ray actor."""

    def __init__(self) -> None:
        self._served = Served()
        self._senders: Senders | None = None

    def place(self) -> Place:
        node = address_of_node(need_ray())
        if name := _interface(node):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        with socket.socket() as found:
            found.bind((node, 0))
            return Place(node, os.getpid(), found.getsockname()[1])

    def start(self, make: Callable[[Seat], Any], seat: Seat) -> Reply:
        return self._served.start(lambda: make(seat))

    def call(self, call: bytes) -> Reply:
        return self._served.call(call)

    def pulse(self) -> float:
        """Runs in a thread of its own, beside `call`."""
        return self._served.pulse()

    def pass_on(self, receivers: Sequence[Receiver]) -> Reply:
        """Send what rank 0 holds to engines. Runs in a thread of its own, beside `call`."""
        if self._senders is None:
            self._senders = Senders()
        return answer(self._senders.send, self._served.rank.held, receivers)


class Actors:
    """One Ray actor for each rank. `make(seat)` runs in each of them; its result is the object that is called."""

    def __init__(
        self, count: int, make: Callable[[Seat], Any], timeout: float, address: str | None, cpus: int = 0,
        gpus: float = 0.0, beside: Beside | None = None,
    ) -> None:  # fmt: skip
        """If Ray is started here, it gets at least `cpus`. Each rank gets one CPU and `gpus`. Room for the engines of
        `beside` is kept."""
        self.count, self._gpus = count, gpus
        self._ray = CONNECTION.join(max(cpus, count), address)
        self._here = address_of_node(self._ray)
        try:
            self.bundles = Bundles(self._ray, count, gpus, beside, timeout)
            self._actors = self._create()
            self._asked: list[Any] = [None] * count
            self._pulses: dict[int, float] = {}
            self.places: list[Place] = self._ray.get([actor.place.remote() for actor in self._actors])
            meeting = f"tcp://{self.places[0].node}:{self.places[0].port}"
            threads = max(1, torch.get_num_threads() // count)
            self._pending = [
                actor.start.remote(make, Seat(rank, count, meeting, timeout, threads))
                for rank, actor in enumerate(self._actors)
            ]
        except BaseException as error:
            CONNECTION.leave()
            if isinstance(error, self._ray.exceptions.RayError):
                raise SoleraError(f"cluster: Ray cannot start the ranks: {one_line(error)}") from error
            raise

    def send(self, rank: int, call: bytes) -> None:
        self._pending[rank] = self._actors[rank].call.remote(call)

    def wait(self, ranks: Sequence[int], seconds: float | None) -> dict[int, Reply | None]:
        ready, _ = self._ray.wait([self._pending[rank] for rank in ranks], timeout=seconds)
        return {rank: self._received(rank) for rank in ranks if self._pending[rank] in ready}

    def pulses(self) -> dict[int, float]:
        """Asks again each rank that has answered."""
        for rank, asked in enumerate(self._asked):
            ready, _ = self._ray.wait([asked], timeout=0) if asked is not None else ([None], [])
            if not ready:
                continue
            if asked is not None:
                with suppress(self._ray.exceptions.RayError):  # it has died, which `wait` tells
                    self._pulses[rank] = self._ray.get(asked)
            self._asked[rank] = self._actors[rank].pulse.options(concurrency_group=PULSE).remote()
        return self._pulses

    def pass_on(self, receivers: Sequence[Receiver], patience: float) -> Reply | None:
        first, heard = self._actors[0], time.monotonic()
        sending = first.pass_on.options(concurrency_group=PASSING).remote(receivers)
        pulse = None
        while not self._ray.wait([sending], timeout=BEAT)[0]:
            if pulse is None or self._ray.wait([pulse], timeout=0)[0]:
                heard, pulse = time.monotonic(), first.pulse.options(concurrency_group=PULSE).remote()
            elif time.monotonic() - heard > patience:
                raise TimeoutError
        return self._got(sending)

    def signal_of(self, rank: int) -> int | None:
        """Ray does not tell."""
        return None

    def how_it_ended(self, rank: int) -> str:
        return f"died (process {self.places[rank].pid} on {self.places[rank].node})"

    def where(self) -> str:
        return f"Ray actors, {', '.join(f'process {place.pid} on {place.node}' for place in self.places)}"

    def close(self) -> None:
        for place in self.places:  # a process that was stopped does not hear Ray
            if place.node == self._here:
                _kill(place.pid)
        with suppress(self._ray.exceptions.RayError):  # if Ray has died, its actors have too
            for actor in self._actors:
                self._ray.kill(actor)
        self.bundles.leave()
        CONNECTION.leave()

    def _create(self) -> list[Any]:
        made = self._ray.remote(concurrency_groups={PULSE: 1, PASSING: 1})(Actor)
        return [
            made.options(num_cpus=1, num_gpus=self._gpus, scheduling_strategy=self.bundles.for_rank(rank)).remote()
            for rank in range(self.count)
        ]

    def _received(self, rank: int) -> Reply | None:
        return self._got(self._pending[rank])

    def _got(self, asked: Any) -> Reply | None:
        try:
            reply: Reply = self._ray.get(asked)
        except self._ray.exceptions.RayError:  # the rank's own errors are part of its answer
            return None
        # The arrays are in Ray's object store, which has no room for all weights.
        return Reply(reply.pickled, tuple(map(np.copy, reply.arrays)))


def _interface(node: str) -> str | None:
    """The network interface with this address. gloo would take the one that the machine's name resolves to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == node:
                return name
    return None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
