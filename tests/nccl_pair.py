"""Two processes with an NCCL group, for test_gpu.py. `python -m tests.nccl_pair first [NAME]` starts the second one.

NCCL refuses two processes on one GPU of one machine. With a name of its own (`NCCL_HOSTID`) each process seems to be on
another machine. They then talk over sockets, as two machines would.
"""

import json
import os
import signal
import subprocess
import sys
import time

import torch

from solera.engines.faults import EngineError
from solera.engines.groups import MeetingPoint, TensorGroup
from solera.models.digest import describe

TIMEOUT = 10.0
DEVICE = torch.device("cuda", 0)
BIG = 1 << 24


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {"matrix": torch.randn(1000, 77), "vector": torch.randn(5).bfloat16(), "number": torch.tensor(3.5)}
    return {name: tensor.to(DEVICE) for name, tensor in made.items()} | {"big": torch.randn(BIG, device=DEVICE)}


def second(port: int) -> None:
    group = TensorGroup(MeetingPoint("127.0.0.1", TIMEOUT, port), 1, 2, DEVICE)
    received = {name: torch.empty_like(tensor) for name, tensor in tensors().items()}
    for tensor in received.values():
        group.broadcast(tensor)
    print(json.dumps([spec.digest for spec in describe(received.items())]), flush=True)
    time.sleep(600)  # it is killed


def pair(name: str) -> tuple[TensorGroup, subprocess.Popen[str]]:
    point = MeetingPoint("127.0.0.1", TIMEOUT)
    own = {"NCCL_HOSTID": "second"} if name else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.nccl_pair", "second", str(point.port)], env=os.environ | own,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        return TensorGroup(point, 0, 2, DEVICE), process
    except EngineError:
        process.kill()
        raise


def lose(sent: signal.Signals, name: str) -> str:
    """Send everything, then lose the other process while tensors travel. Returns the error that this raises."""
    group, process = pair(name)
    for tensor in tensors().values():
        group.broadcast(tensor)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == [spec.digest for spec in describe(tensors().items())]
    process.send_signal(sent)
    began = time.monotonic()
    try:
        for _ in range(1000):
            group.broadcast(torch.zeros(BIG, device=DEVICE))
        raise AssertionError("nobody received this, and no error was raised")
    except EngineError as error:
        return f"{sent.name} after {time.monotonic() - began:.1f} s: {error}"
    finally:
        process.kill()
        process.wait()
        group.close()
        print(f"closed after {time.monotonic() - began:.1f} s", flush=True)


def alone() -> str:
    """Nobody else comes."""
    began = time.monotonic()
    try:
        TensorGroup(MeetingPoint("127.0.0.1", 2.0), 0, 2, DEVICE)
    except EngineError as error:
        return f"alone after {time.monotonic() - began:.1f} s: {error}"
    raise AssertionError("a group of one process that should have two")


def first(name: str) -> None:
    print(alone(), flush=True)
    for sent in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):  # each needs a new group
        print(lose(sent, name), flush=True)
    assert float(torch.ones(8, device=DEVICE).sum()) == 8.0
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    print("this process goes on", flush=True)


if __name__ == "__main__":
    role, given = sys.argv[1], (sys.argv[2:] or [""])[0]
    if given and role == "first":
        os.environ |= {"NCCL_HOSTID": given, "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    first(given) if role == "first" else second(int(given))
