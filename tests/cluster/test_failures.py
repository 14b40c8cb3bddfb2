"""A rank that dies or hangs is named, and nothing keeps running."""

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from solera.cluster.actors import Actors
from solera.errors import SoleraError
from solera.sharded.processes import Processes, limit, receive
from solera.sharded.rank import GroupPeers, Seat
from solera.sharded.ranks import RankError, Ranks
from tests.cluster.hosts import seconds_until
from tests.cluster.ranks import Reusable, begin, spec_of, start
from tests.cluster.test_sharded import batch_of
from tests.learner.test_invariance import GRPO, make_groups

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("sent", "says"),
    [(signal.SIGKILL, "rank 1 of 3 was ended by signal 9"), (signal.SIGSTOP, "rank 1 of 3 did not answer in learn")],
)
def test_a_rank_that_dies_or_hangs_is_named_within_the_time_limit(sent, says):
    ranks, spec = start(3, timeout=5.0), spec_of(GRPO)
    sharded = begin(ranks, spec)
    batch = batch_of(make_groups(), sharded, spec)
    sharded.update(batch)
    os.kill(ranks.host.processes[1].pid, sent)
    began = time.monotonic()
    with pytest.raises(RankError, match=says):
        sharded.update(batch)
    assert time.monotonic() - began < 60  # 5 s, 3 s for the others to report, and a busy machine
    assert not any(process.is_alive() for process in ranks.host.processes)
    with pytest.raises(RankError, match="have ended"):
        sharded.update(batch)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """Actors use a Ray that runs in this process, and leave it running: starting one takes seconds."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(params=["processes", "ray"])
def host(request) -> Callable[[float], Ranks]:
    if request.param == "ray":
        request.getfixturevalue("ray")
    hosts = {"processes": Processes, "ray": partial(Actors, address=None)}
    return lambda timeout: Ranks(hosts[request.param](2, Reusable, timeout), timeout)


def pids_of(ranks: Ranks) -> list[int]:
    own = ranks.host.processes if isinstance(ranks.host, Processes) else ranks.host.places
    return [each.pid for each in own]


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "asleep"])
def test_ranks_that_all_hang_outside_of_collectives_are_named(host, stopped):
    """None of them waits for another, so none of them notices."""
    ranks = host(2.0)
    pids = pids_of(ranks)
    assert ranks.call("compute", [(0.1,)] * 2) == [0.1, 0.1]
    if stopped:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 and rank 1 of 2 did not answer in sleep \(time limit 2 s\)"):
        ranks.call("sleep", [(600.0,)] * 2)
    assert 7 < time.monotonic() - began < 90  # 2 s, 6 s in which a rank could report another, and a busy machine
    seconds_until(lambda: not any(map(runs, pids)), 10, "killed ranks end")  # Linux needs a moment


def test_a_rank_that_was_stopped_before_a_large_call_is_named():
    """Nobody reads the call, which does not fit into the connection's buffer."""
    ranks = Ranks(Processes(2, Reusable, 1.0), 1.0)
    assert ranks.call("read", [(b" " * 10**7,)] * 2) == [10**7] * 2
    os.kill(ranks.host.processes[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 did not answer in read \(time limit 1 s\)"):
        ranks.call("read", [(b" " * 10**7,)] * 2)
    assert 6 < time.monotonic() - began < 60
    assert not any(process.is_alive() for process in ranks.host.processes)


def test_an_answer_that_stops_in_the_middle_is_not_awaited_for_ever():
    ours, theirs = multiprocessing.Pipe()
    limit(ours, 0.5)
    theirs.send_bytes(pickle.dumps((b"", [10**6])))
    os.write(theirs.fileno(), b" " * 1000)
    with pytest.raises(BlockingIOError):
        receive(ours)


def test_a_rank_that_computes_for_longer_than_the_time_limit_is_left_alone(host):
    """Both compute, so neither is late for the other."""
    ranks = host(1.0)
    assert ranks.call("compute", [(12.0,)] * 2) == [12.0, 12.0]
    with pytest.raises(RankError, match="rank 1 of 2 did not answer in compute"):
        ranks.call("compute", [(0.1,), (600.0,)])


class Faulty:
    """A rank without a model, whose faults are chosen."""

    def __init__(self, seat: Seat) -> None:
        self.peers = GroupPeers(seat)  # so that none is late at the start

    def abort(self, seconds: float, exits: bool) -> None:
        time.sleep(seconds)
        if exits:
            os.abort()

    def fail(self, fault: str) -> None:
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 768.00 MiB.")
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_rank_without_memory_stops_the_run_with_advice_instead_of_a_restart():
    """Even if it made another rank fail."""
    ranks = Ranks(Processes(2, Faulty, 60.0), 60.0)
    says = r"^rank 1 of 2 failed in fail: the GPU's memory is full: lower learn.micro_batch_tokens, set"
    with pytest.raises(SoleraError, match=says) as raised:
        ranks.call("fail", [("launch",), ("memory",)])
    assert not isinstance(raised.value, RankError)  # after which all ranks would be started again
    assert not any(process.is_alive() for process in ranks.host.processes)


@pytest.mark.parametrize(
    ("timeout", "says"),
    [
        (2.0, r"^rank 1 of 2 did not answer in abort \(time limit 2 s\)$"),
        (60.0, "^rank 0 of 2 was ended by signal 6 in abort; rank 1 did not answer$"),
    ],
    ids=["after the time limit", "before it"],
)
def test_a_rank_that_torch_ended_because_it_waited_too_long_is_not_blamed(timeout, says):
    """NCCL does that to the rank that waits. Here rank 0 ends itself after 2.1 seconds, and rank 1 hangs."""
    ranks = Ranks(Processes(2, Faulty, timeout), timeout)
    with pytest.raises(RankError, match=says):
        ranks.call("abort", [(2.1, True), (600.0, False)])


CONTROLLER = """
import sys
from tests.cluster.ranks import begin, spec_of, start
from tests.cluster.test_sharded import batch_of
from tests.learner.test_invariance import GRPO, make_groups

if __name__ == "__main__":
    ranks, spec = start(2), spec_of(GRPO, micro_batch_tokens=1, passes=100_000)
    sharded = begin(ranks, spec)
    print(*(process.pid for process in ranks.host.processes), flush=True)
    if sys.argv[1] == "learning":
        sharded.update(batch_of(make_groups(), sharded, spec))
    elif sys.argv[1] == "waiting":
        input()
"""


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def controller_of(folder: Path, doing: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with two ranks, and their process ids."""
    script = folder / "controller.py"
    script.write_text(CONTROLLER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.getenv("PYTHONPATH")]))}
    controller = subprocess.Popen(
        [sys.executable, script, doing], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    pids = [int(word) for word in controller.stdout.readline().split()]
    assert len(pids) == 2
    return controller, pids


def test_a_program_that_does_not_close_its_ranks_ends_with_them(tmp_path):
    controller, pids = controller_of(tmp_path, "nothing")
    try:
        assert controller.wait(60) == 0
    finally:
        controller.kill()
        controller.communicate()
    seconds_until(lambda: not any(map(runs, pids)), 60, "the ranks end")


@pytest.mark.parametrize("doing", ["waiting", "learning"])
def test_ranks_end_when_the_controller_is_killed(tmp_path, doing):
    controller, pids = controller_of(tmp_path, doing)
    assert all(map(runs, pids))
    time.sleep(2)
    assert controller.poll() is None
    controller.kill()
    controller.communicate()
    seconds_until(lambda: not any(map(runs, pids)), 60, "the ranks end")
