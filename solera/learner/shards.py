"""What a checkpoint needs of a learner beside its weights, written by all ranks together: each writes its own part.

The format is that of `torch.distributed.checkpoint`. Any number of ranks can read it, and a single process too. Tensors
are called `optimiser/PARAMETER/exp_avg` or `reference/PARAMETER`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OPTIMISER, REFERENCE, NUMBERS = "optimiser", "reference", "numbers"


def write_shards(folder: Path, state: dict[str, Any], like: Mapping[str, Tensor], group: Any) -> None:
    """Write `Learner.state()`. `like` are the parameters; `group` are the ranks, `None` for a single process."""
    import torch.distributed.checkpoint as dcp  # most runs do not need it, and it takes time to import

    names = list(like)
    tensors = {
        f"{OPTIMISER}/{names[number]}/{key}": value
        for number, of_one in state["optimiser"]["state"].items()
        for key, value in of_one.items()
    }
    tensors |= {f"{REFERENCE}/{name}": value for name, value in (state["reference"] or {}).items()}
    for name, value in state["numbers"].items():
        tensors[f"{NUMBERS}/{name}"] = torch.tensor(float(value), dtype=torch.float64)
    tensors["count"] = torch.tensor(len(names))  # torch cannot write a checkpoint without tensors
    dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=group is None)


def read_shards(folder: Path, like: Mapping[str, Tensor], group: Any) -> dict[str, Any]:
    """Read what `write_shards` wrote, divided like the parameters `like`. Only `param_groups` is missing."""
    import torch.distributed.checkpoint as dcp

    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: _room_for(key, described, like) for key, described in known.items()}
    dcp.load(tensors, checkpoint_id=folder, process_group=group, no_dist=group is None)
    if int(tensors["count"]) != len(like):
        raise ValueError(f"{folder} is of a model with {int(tensors['count'])} trained tensors, not {len(like)}")
    moments: dict[int, dict[str, Tensor]] = {}
    names = {name: number for number, name in enumerate(like)}
    for key, value in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == OPTIMISER:
            name, _, moment = rest.rpartition("/")
            moments.setdefault(names[name], {})[moment] = value
    reference = {key.partition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{REFERENCE}/")}
    numbers = {key.partition("/")[2]: float(value) for key, value in tensors.items() if key.startswith(f"{NUMBERS}/")}
    return {"optimiser": {"state": moments}, "reference": reference or None, "numbers": numbers}


def _room_for(key: str, described: Any, like: Mapping[str, Tensor]) -> Tensor:
    kind, _, rest = key.partition("/")
    name = rest.rpartition("/")[0] if kind == OPTIMISER else rest
    if name in like and described.size == like[name].shape:
        return torch.empty_like(like[name].detach(), dtype=described.properties.dtype)
    return torch.empty(described.size, dtype=described.properties.dtype)
