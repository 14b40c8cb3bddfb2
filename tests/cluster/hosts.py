"""Two hosts on one machine: network namespaces with a cable between them, each with a Ray node.

They need the command `ip` (iproute2), and root or a kernel in which users may make namespaces. Without these, the tests
fail and say what is missing.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

import pytest

from solera.cluster.connection import QUICK_CHECKS
from tests.cluster import namespace
from tests.command import ROOT, SEARCH_PATH

CABLE = "veth0"
PORT = 6379
COUNT_NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
"""


class Host:
    """A network namespace, and a process that holds it. An ordinary user's second host must be `beside` the first, in
    the same namespace of users."""

    def __init__(self, address: str, folder: Path, cpus: int = 1, beside: "Host | None" = None) -> None:
        self.address, self.folder, self.cpus = address, folder, cpus
        self._flags = flags_of_unshare()
        make = (
            beside.enter("--user", "unshare", "--net") if beside and self._flags else ["unshare", *self._flags, "--net"]
        )
        hold = [*make, sys.executable, namespace.__file__]
        self._holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._holder.pid
        assert self._holder.stdout.readline() == b"ready\n", f"no namespace: {' '.join(hold)}"
        self.ip("link", "set", "lo", "up")

    @property
    def environment(self) -> dict[str, str]:
        """Ray's nodes know each other by a token. Ray's own place for it is in the user's home."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}
        return {**os.environ, **QUICK_CHECKS, **token, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": SEARCH_PATH}

    def enter(self, *arguments: object) -> list[str]:
        """A command of `nsenter` for this host."""
        return ["nsenter", "--target", str(self.pid), "--preserve-credentials", *map(str, arguments)]

    def command(self, *arguments: object) -> list[str]:
        """A command that runs on this host."""
        return self.enter("--net", *(["--user"] if self._flags else []), *arguments)

    def ip(self, *arguments: object) -> str:
        return shell(*self.command(command_ip(), *arguments))

    def solera(self, *arguments: object, said: Path, **changes: str) -> "subprocess.Popen[bytes]":
        """Start the command on this host. Its messages go to the file `said`."""
        command = self.command(sys.executable, "-m", "solera.cli", *arguments)
        with said.open("wb") as file:
            return subprocess.Popen(command, cwd=ROOT, env={**self.environment, **changes}, stdout=file, stderr=file)

    def start_ray(self, head: "Host") -> None:
        """Start a Ray node, unless there is one."""
        if self.raylet() is not None:
            return
        self.end_processes()  # what a node that died has left
        own = ("--node-ip-address", self.address, "--num-cpus", self.cpus, "--object-store-memory", 100_000_000)
        others = ("--address", f"{head.address}:{PORT}")
        if head is self:
            others = ("--head", "--port", PORT, "--include-dashboard", "false", "--temp-dir", self.folder / "ray")
        ray = Path(sys.executable).with_name("ray")
        shell(*self.command(ray, "start", *others, *own), environment=self.environment)

    def processes(self) -> dict[int, str]:
        """The command lines of its processes."""
        return namespace.processes_beside(self.pid)

    def ranks(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith("ray::Actor")]

    def engines(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith("ray::EngineActor")]

    def raylet(self) -> int | None:
        return next((pid for pid, command in self.processes().items() if "/raylet/raylet " in command), None)

    def end_processes(self) -> None:
        namespace.end_processes_beside(self.pid)

    def plug(self) -> None:
        self.ip("link", "set", CABLE, "up")

    def unplug(self) -> None:
        self.ip("link", "set", CABLE, "down")

    def close(self) -> None:
        """End its processes. The namespace ends with them."""
        self._holder.communicate(timeout=2 * namespace.PATIENCE)
        assert self._holder.returncode == 0


class Hosts:
    """The first host has the head of the Ray cluster."""

    def __init__(self, folder: Path, first: Host, second: Host) -> None:
        (folder / "token").write_text(secrets.token_hex(32))
        self.first, self.second, self.both = first, second, (first, second)
        first.ip("link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second.pid)
        for host in self.both:
            host.ip("addr", "add", f"{host.address}/24", "dev", CABLE)
        self.repair()

    @property
    def address(self) -> str:
        return f"{self.first.address}:{PORT}"

    def repair(self) -> None:
        """Plug the cable in and start the Ray nodes that are missing. Both know then that they are two."""
        for host in self.both:
            host.plug()
            host.start_ray(self.first)
        deadline = time.monotonic() + 300
        while self.alive() != 2:
            assert time.monotonic() < deadline, "the two Ray nodes do not find each other"
            time.sleep(0.5)

    def alive(self) -> int:
        """Number of nodes that the head believes to be alive."""
        asking = self.first.command(sys.executable, "-c", COUNT_NODES, self.address)
        return int(shell(*asking, environment=self.first.environment).split()[-1])


@contextmanager
def two_hosts(cpus: tuple[int, int] = (1, 1)) -> Iterator[Hosts]:
    """`cpus` are those that Ray has on each host."""
    folder = Path(tempfile.mkdtemp(prefix="solera-test-"))  # short: Ray's sockets are in it
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        first = stack.enter_context(closing(Host("10.93.0.1", folder, cpus[0])))
        second = stack.enter_context(closing(Host("10.93.0.2", folder, cpus[1], beside=first)))
        yield Hosts(folder, first, second)


@cache
def flags_of_unshare() -> tuple[str, ...]:
    """What `unshare` needs to make a network namespace here: nothing for root, a namespace of users for others."""
    for command, package in (("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(command) is None:
            pytest.fail(f"two hosts need the command `{command}`: install {package}", pytrace=False)
    for flags in ((), ("--user", "--map-root-user")):
        command = ["unshare", *flags, "--net", command_ip(), "link", "set", "lo", "up"]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return flags
    pytest.fail(
        f"two hosts need network namespaces, and this machine refuses them ({tried.stderr.strip()}): run the tests as "
        "root, or allow user namespaces (sysctl user.max_user_namespaces and kernel.unprivileged_userns_clone)",
        pytrace=False,
    )


def command_ip() -> str:
    found = shutil.which("ip", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
    if found is None:
        pytest.fail("two hosts need the command `ip`: install the package iproute2", pytrace=False)
    return found


def shell(*command: object, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, f"{' '.join(map(str, command))}: {ended.stderr or ended.stdout}"
    return ended.stdout


def seconds_until(condition, limit: float, what: str) -> float:
    """Wait until a condition holds; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit, f"not within {limit:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began
