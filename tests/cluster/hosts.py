"""Two hosts on one machine: network namespaces with a cable between them, each with a Ray node.

It needs root and the command `ip` (iproute2). What a test that was killed has left behind is removed by the next one.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solera.cluster.connection import QUICK_CHECKS
from tests.command import ROOT, SEARCH_PATH

PREFIX = "solera-test-"
CABLE = "veth0"
PORT = 6379
COUNT_NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
"""


class Host:
    """A network namespace."""

    def __init__(self, name: str, address: str, folder: Path, cpus: int = 1) -> None:
        self.name, self.address, self.folder, self.cpus = name, address, folder, cpus
        shell("ip", "netns", "add", name)
        shell("ip", "-n", name, "link", "set", "lo", "up")

    @property
    def environment(self) -> dict[str, str]:
        """Ray's nodes know each other by a token. Ray's own place for it is in the user's home."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}
        return {**os.environ, **QUICK_CHECKS, **token, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": SEARCH_PATH}

    def command(self, *arguments: object) -> list[str]:
        return ["ip", "netns", "exec", self.name, *map(str, arguments)]

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
        found = {}
        for pid in map(int, shell("ip", "netns", "pids", self.name).split()):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def ranks(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith("ray::Actor")]

    def engines(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith("ray::EngineActor")]

    def raylet(self) -> int | None:
        return next((pid for pid, command in self.processes().items() if "/raylet/raylet " in command), None)

    def end_processes(self) -> None:
        end_processes(self.name)

    def plug(self) -> None:
        shell("ip", "-n", self.name, "link", "set", CABLE, "up")

    def unplug(self) -> None:
        shell("ip", "-n", self.name, "link", "set", CABLE, "down")


class Hosts:
    """The first host has the head of the Ray cluster."""

    def __init__(self, folder: Path, cpus: tuple[int, int]) -> None:
        (folder / "token").write_text(secrets.token_hex(32))
        self.first = Host(f"{PREFIX}{os.getpid()}-a", "10.93.0.1", folder, cpus[0])
        self.second = Host(f"{PREFIX}{os.getpid()}-b", "10.93.0.2", folder, cpus[1])
        ends = [self.first.name, "type", "veth", "peer", "name", CABLE, "netns", self.second.name]
        shell("ip", "link", "add", CABLE, "netns", *ends)
        for host in self.both:
            shell("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", CABLE)
        self.repair()

    @property
    def both(self) -> tuple[Host, Host]:
        return self.first, self.second

    @property
    def address(self) -> str:
        return f"{self.first.address}:{PORT}"

    def repair(self) -> None:
        """Plug the cable in and start the Ray nodes that are missing. Both know then that they are two."""
        for host in self.both:
            host.plug()
            host.start_ray(self.first)
        deadline = time.monotonic() + 120
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
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # short: Ray's sockets are in it
    try:
        yield Hosts(folder, cpus)
    finally:
        remove(os.getpid())
        shutil.rmtree(folder)


def remove_leftovers() -> None:
    """Namespaces of test processes that do not run any more, and the processes in them."""
    names = shell("ip", "netns", "list").split()
    for pid in {int(found[1]) for name in names if (found := re.fullmatch(rf"{PREFIX}(\d+)-[ab]", name))}:
        if pid == os.getpid() or not Path(f"/proc/{pid}").exists():
            remove(pid)


def remove(pid: int) -> None:
    """Remove the namespaces of a test process. The cable goes with them."""
    for name in (f"{PREFIX}{pid}-a", f"{PREFIX}{pid}-b"):
        if name in shell("ip", "netns", "list").split():
            end_processes(name)
            shell("ip", "netns", "del", name)


def end_processes(name: str) -> None:
    deadline = time.monotonic() + 30
    while pids := shell("ip", "netns", "pids", name).split():
        assert time.monotonic() < deadline, f"processes {pids} of {name} do not end"
        for pid in map(int, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def shell(*command: object, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=180, check=False
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
