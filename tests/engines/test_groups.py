"""Process groups that carry weights, and how the way to an engine is chosen. Both ends are threads of this process."""

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from solera.cluster.passing import way
from solera.config import Transport
from solera.engines import groups
from solera.engines.faults import EngineError
from solera.engines.groups import MeetingPoint, TensorGroup
from solera.engines.vllm.receiving import from_group, join
from solera.engines.vllm.transport import GroupTransport

CPU = torch.device("cpu")
HERE = "127.0.0.1"


def pair(timeout: float) -> tuple[TensorGroup, TensorGroup]:
    point = MeetingPoint(HERE, timeout)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(TensorGroup, point, 0, 2, CPU, HERE)
        second = threads.submit(lambda: TensorGroup(MeetingPoint(HERE, timeout, point.port), 1, 2, CPU, HERE))
        return first.result(), second.result()


def within(seconds: float, failing: Callable[[], object], says: str) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match=says):
        failing()
    assert time.monotonic() - began < seconds


def test_what_is_sent_arrives_bit_for_bit():
    torch.manual_seed(0)
    sent = [
        torch.randn(300, 70), torch.randn(9).bfloat16(), torch.tensor(3.5, dtype=torch.float16), torch.zeros(0, 4),
        torch.randn(3, 5, dtype=torch.float64), torch.tensor([float("nan"), -0.0, float("inf")]),
    ]  # fmt: skip
    first, second = pair(20.0)
    received = [torch.empty_like(tensor) for tensor in sent]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda group, own: [group.broadcast(each) for each in own], (first, second), (sent, received)))
    for one, other in zip(sent, received, strict=True):
        assert one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))
    first.close()
    second.close()


def test_a_peer_that_has_gone_is_an_error_at_once():
    first, second = pair(60.0)
    second.close()
    within(20, lambda: [first.broadcast(torch.zeros(1 << 20)) for _ in range(100)], "^a tensor did not arrive: .*peer")
    first.close()


def test_a_peer_that_does_not_take_a_tensor_is_an_error_after_the_time_limit():
    first, second = pair(1.0)
    within(
        10, lambda: [first.broadcast(torch.zeros(1 << 22)) for _ in range(100)], "^a tensor did not arrive: .*1000ms"
    )
    first.close()
    second.close()


def test_if_nobody_comes_it_is_an_error_after_the_time_limit():
    within(10, lambda: TensorGroup(MeetingPoint(HERE, 1.0), 0, 2, CPU, HERE), "^the processes did not meet: ")


def test_a_port_on_which_nobody_listens_is_an_error_after_the_time_limit():
    with socket.socket() as taken:
        taken.bind((HERE, 0))  # not listening
        port = taken.getsockname()[1]
        within(10, lambda: MeetingPoint(HERE, 1.0, port), f"^no connection to {HERE}, port {port}: ")


def test_a_worker_of_a_server_that_has_gone_is_an_error_of_the_trainer():
    transport, model = GroupTransport(CPU, HERE), torch.nn.Linear(2, 2)
    where = transport.meeting(1)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, where, SimpleNamespace(data_parallel_index=0, world_size=1, rank=0))
        transport.meet()
        worker = joining.result()
        tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(1 << 20)}
        transport.offer("label", tensors)
        expected = [[name, list(tensor.shape), str(tensor.dtype), ""] for name, tensor in tensors.items()]
        receiving = threads.submit(from_group, {}, expected, worker, model)
        transport.send()
        assert all(receiving.result()[name].equal(tensor) for name, tensor in tensors.items())
    worker.close()
    within(20, lambda: [transport.send() for _ in range(100)], "^a tensor did not arrive: .*peer")
    transport.close()


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_of_gpus_is_made_without_a_watchdog_and_other_groups_keep_theirs(monkeypatch, before):
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with groups._blocking_wait():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before


@pytest.mark.parametrize(
    ("transport", "here", "there", "chosen"),
    [
        ("auto", "GPU-1", "GPU-1", "handle"), ("auto", "GPU-1", "GPU-2", "nccl"), ("auto", "", "", "store"),
        ("auto", "GPU-1", "", "store"), ("auto", "", "GPU-1", "store"),
        ("file", "GPU-1", "", "store"),  # a vLLM server in an actor, which writes the file
        ("store", "GPU-1", "GPU-1", "store"), ("store", "GPU-1", "GPU-2", "store"), ("store", "", "", "store"),
        ("group", "GPU-1", "GPU-1", "gloo"), ("group", "GPU-1", "GPU-2", "nccl"), ("group", "", "", "gloo"),
        ("group", "GPU-1", "", "gloo"), ("group", "", "GPU-1", "gloo"),
    ],
)  # fmt: skip
def test_how_weights_go_from_a_device_to_an_engine(transport: Transport, here: str, there: str, chosen: str):
    assert way(transport, here, there) == chosen
