"""How the tensors of an update reach a worker of the server, one function for each transport of `transport.py`."""

import base64
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solera.engines.groups import MeetingPoint, TensorGroup, gpu_of

Receive = Callable[[dict[str, Any], list[list[Any]], Any, torch.nn.Module], dict[str, Tensor]]
"""Takes where the update lies, what should arrive (name, shape, type, digest), the group and the model."""
PATIENCE = 120.0
"""Seconds to wait for the other side of a broadcast."""


def from_file(
    source: dict[str, Any], expected: list[list[Any]], group: Any, model: torch.nn.Module
) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    device = next(iter(model.parameters())).device
    return load_file(source["path"], device=str(device))


def from_ipc(
    source: dict[str, Any], expected: list[list[Any]], group: Any, model: torch.nn.Module
) -> dict[str, Tensor]:
    """Tensors in the learner's GPU memory, through CUDA's handles."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = torch.cuda.current_device()
    own, found = gpu_of(torch.device("cuda", index)), {}
    for (name, shape, dtype, _), handle in zip(expected, source["handles"], strict=True):
        if handle["gpu"] != own:
            raise ValueError(f"the weights are on GPU {handle['gpu']}, this worker is on {own}")
        found[name] = rebuild_cuda_tensor(
            Tensor, torch.Size(shape), tuple(handle["stride"]), handle["offset"], torch.UntypedStorage,
            getattr(torch, dtype.removeprefix("torch.")), index, base64.b64decode(handle["memory"]),
            handle["size"], handle["start"], False, base64.b64decode(handle["counter"]), handle["counter_offset"],
            base64.b64decode(handle["event"]), handle["sync"],
        )  # fmt: skip
    return found


def from_group(
    source: dict[str, Any], expected: list[list[Any]], group: Any, model: torch.nn.Module
) -> dict[str, Tensor]:
    """Broadcast tensors, in the order of `expected`."""
    device = next(iter(model.parameters())).device
    found = {}
    for name, shape, dtype, _ in expected:
        found[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        group.broadcast(found[name])
    return found


def join(meeting: dict[str, Any], parallel: Any) -> Any:
    """Join the trainer's process group, as rank 1 and up. Without a meeting place there is none."""
    if not meeting:
        return None
    rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
    device = torch.device("cuda", torch.cuda.current_device()) if meeting["on_gpu"] else torch.device("cpu")
    return TensorGroup(MeetingPoint(meeting["host"], PATIENCE, meeting["port"]), rank, meeting["size"], device)


RECEIVE: dict[str, Receive] = {"file": from_file, "ipc": from_ipc, "group": from_group}
