"""Ranks on two hosts, one on each. A fault of a rank, of its Ray node or of the cable between the hosts is survived, or
the run stops in one line and can be resumed. Either way it ends with the bits of a run that nothing happened to.

`pytest -s` prints how long a run took to go on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from solera.report.sinks import read_metrics
from tests.cluster.hosts import Hosts, seconds_until, two_hosts
from tests.cluster.runs import assert_same, reached, write
from tests.cluster.test_failures import runs
from tests.command import ROOT
from tests.test_account import assert_the_checkpoint_agrees, verified

pytestmark = pytest.mark.cluster
LIMIT = 600
"""Seconds in which a run must end, on a busy machine."""


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(two) -> Hosts:
    two.repair()
    return two


class Run:
    """`solera train` on the first host."""

    def __init__(self, hosts: Hosts, tmp_path: Path, timeout: float) -> None:
        self.hosts, self.folder, self.messages = hosts, tmp_path / "hosts", tmp_path / "said"
        file = write(tmp_path, "hosts", runtime="ray", address=f'"{hosts.address}"', timeout=timeout, restarts=2)
        self.begin("train", file)

    def begin(self, *arguments: object) -> None:
        self.process = self.hosts.first.solera(*arguments, said=self.messages)

    def said(self) -> str:
        return " ".join(self.messages.read_text().split())

    def reached(self, rows: int) -> None:
        reached(self.folder, rows, self.process)
        assert [len(host.ranks()) for host in self.hosts.both] == [1, 1]

    def went_on(self) -> bool:
        """Whether it has logged a row after a restart."""
        if self.process.poll() is not None or "resuming from step" not in self.said():
            return self.process.poll() is not None
        rows = self.rows()
        seconds_until(lambda: self.rows() > rows or self.process.poll() is not None, LIMIT, "a row after the restart")
        return True

    def rows(self) -> int:
        return len(read_metrics(self.folder / "metrics.jsonl"))

    def end(self) -> int:
        return self.process.wait(LIMIT)

    def resume(self) -> None:
        self.begin("train", "--resume", self.folder)
        assert self.end() == 0, self.said()


@pytest.fixture
def begin(hosts, tmp_path) -> Iterator[Callable[[float], Run]]:
    begun: list[Run] = []

    def start(timeout: float = 60.0) -> Run:
        begun.append(Run(hosts, tmp_path, timeout))
        return begun[-1]

    yield start
    for run in begun:
        run.process.kill()
        run.process.wait()


def assert_nothing_was_lost(run: Run, undisturbed: Path) -> None:
    """The result is that of an undisturbed run, and every token is accounted for."""
    assert_same(run.folder, undisturbed)
    assert assert_the_checkpoint_agrees(run.folder).difference == 0
    checked = verified(run.folder)
    assert checked.returncode == 0, checked.stderr


def told(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s")


def test_the_processes_of_a_host_end_when_the_test_is_killed():
    script = (
        "import os, subprocess; from pathlib import Path; from tests.cluster.hosts import Host\n"
        "left = Host('', Path())\n"
        "sleep = subprocess.Popen(left.command('sleep', 600), stdout=subprocess.DEVNULL)\n"
        "while sleep.pid not in left.processes(): pass\n"
        "print(left.pid, sleep.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -9
    pids = list(map(int, killed.stdout.split()))
    seconds_until(lambda: len(pids) == 2 and not any(map(runs, pids)), 60, f"the processes {pids} end")


def test_a_cluster_that_wants_another_token_is_named_in_one_line(hosts, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    file = write(tmp_path, "unknown", runtime="ray", address=f'"{hosts.address}"')
    said = tmp_path / "said"
    changes = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert hosts.first.solera("train", file, said=said, **changes).wait(LIMIT) == 2
    last = said.read_text().strip().splitlines()[-1]
    assert (
        f"cannot join a Ray cluster at {hosts.address} (if it runs, it may want its token: set RAY_AUTH_MODE=token"
        in last
    )


def test_ranks_on_two_hosts_train_the_same_run_as_processes(begin, undisturbed):
    run = begin()
    run.reached(2)
    assert run.end() == 0, run.said()
    assert_nothing_was_lost(run, undisturbed)
    assert all(address in run.said() for address in ("10.93.0.1", "10.93.0.2"))


@pytest.mark.parametrize(
    ("sent", "timeout", "says"),
    [(signal.SIGKILL, 60.0, "died (process"), (signal.SIGSTOP, 15.0, "did not answer in")],
)
def test_a_rank_on_the_other_host_is_lost(begin, undisturbed, sent, timeout, says):
    run = begin(timeout)
    run.reached(6)
    (lost,) = run.hosts.second.ranks()
    os.kill(lost, sent)
    told(f"{sent.name} of a rank", seconds_until(run.went_on, LIMIT, run.said()))
    assert run.end() == 0, run.said()
    assert says in run.said() and "starting all ranks again, 1 further restart" in run.said()
    assert_nothing_was_lost(run, undisturbed)
    told("until it was gone", seconds_until(lambda: not runs(lost), 120, "the lost rank ends"))


def test_the_other_hosts_raylet_is_killed_and_another_takes_its_place(begin, undisturbed):
    run = begin(60.0)
    run.reached(6)
    began = time.monotonic()
    os.kill(run.process.pid, signal.SIGSTOP)  # a fast run would end before it learns of the loss
    os.kill(run.hosts.second.raylet(), signal.SIGKILL)
    seconds_until(lambda: not run.hosts.second.ranks(), LIMIT, "its rank ends")
    os.kill(run.process.pid, signal.SIGCONT)
    seconds_until(lambda: "starting all ranks again" in run.said() or run.process.poll() is not None, LIMIT, run.said())
    assert run.process.poll() is None, run.said()
    run.hosts.second.start_ray(run.hosts.first)
    told("the raylet was replaced", time.monotonic() - began)
    seconds_until(run.went_on, LIMIT, run.said())
    told("SIGKILL of a raylet", time.monotonic() - began)
    assert run.end() == 0, run.said()
    assert_nothing_was_lost(run, undisturbed)


def test_a_cable_that_is_unplugged_for_five_seconds_only_delays_the_run(begin, undisturbed):
    run = begin(60.0)
    run.reached(5)
    run.hosts.second.unplug()
    time.sleep(5)
    run.hosts.second.plug()
    rows = run.rows()
    told("after a cut of 5 s", seconds_until(lambda: run.rows() > rows + 1, LIMIT, run.said()))
    assert run.end() == 0, run.said()
    assert "starting all ranks again" not in run.said()
    assert_nothing_was_lost(run, undisturbed)


def test_a_cable_that_is_unplugged_for_a_minute_stops_the_run_and_it_can_be_resumed(begin, undisturbed):
    run = begin(15.0)
    run.reached(6)
    began = time.monotonic()
    run.hosts.second.unplug()
    assert run.end() == 2, run.said()
    told("cut of 60 s: stopped", time.monotonic() - began)
    last = run.messages.read_text().strip().splitlines()[-1]
    assert "the Ray cluster" in last and f"continue with: solera train --resume {run.folder}" in last
    assert not run.hosts.first.ranks()
    time.sleep(max(0.0, began + 60 - time.monotonic()))
    run.hosts.second.plug()
    told("until no rank is left", seconds_until(lambda: not run.hosts.second.ranks(), 120, "the rank ends"))
    run.hosts.repair()
    run.resume()
    assert_nothing_was_lost(run, undisturbed)


def test_after_the_controller_is_killed_no_rank_is_left_on_either_host(begin, undisturbed):
    run = begin(60.0)
    run.reached(6)
    ranks = [pid for host in run.hosts.both for pid in host.ranks()]
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    told("SIGKILL of the controller: ranks end", seconds_until(lambda: not any(map(runs, ranks)), 120, "ranks end"))
    run.resume()
    assert_nothing_was_lost(run, undisturbed)
