"""A language model whose weights are divided among ranks with FSDP2."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from solera.models.language_model import LanguageModel
from solera.models.pinned import in_cpu_memory
from solera.models.unloaded import Unloaded
from solera.sharded.effort import Waiting, gather_timed, reduce_timed

T = TypeVar("T", bound=tuple[Tensor, ...])
ENTRY = "run_with_weights"
"""Name of the method of the outermost module around which FSDP gathers the embedding, the last norm and the head."""


class ShardedModel(LanguageModel):
    """Every rank makes it from the same model, and then keeps its own part of each weight. Of a model that is not
    loaded yet, it never holds more than one layer, or the embedding and the head, beside new adapters."""

    def __init__(
        self, model: LanguageModel | Unloaded, mesh: DeviceMesh, waiting: Waiting, trained: bool = True
    ) -> None:
        _shard(model.module, mesh, model.fill if isinstance(model, Unloaded) else _nothing_to_load, waiting)
        self._gathering = gathering_mesh(mesh)
        if not trained:
            model.module.requires_grad_(False)
        super().__init__(model.module, model.adapter)  # lists the parameters, which are others now
        self.takes_any_mask = model.takes_any_mask

    def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        return getattr(self.module, ENTRY)(function, self, *arguments, **named)

    def whole(self, tensor: Tensor) -> Tensor:
        return gathered(tensor, self._gathering) if isinstance(tensor, DTensor) else tensor

    def end_to_end(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """The whole of these parameters, one after the other, in another number format."""
        return gathered_together([self.parameters()[name] for name in names], dtype, self._gathering)


def gathering_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Where divided tensors are gathered. Over gloo it is in CPU memory: with tensors on a GPU, torch 2.11 ended the
    process with a segmentation fault."""
    group = mesh.get_group()
    return DeviceMesh.from_group(group, "cpu") if dist.get_backend(group) == "gloo" else mesh


def gathered(tensor: DTensor, mesh: DeviceMesh) -> Tensor:
    """The whole of a divided tensor, on the device of `mesh`. It has the same ranks as the tensor's own mesh."""
    part = tensor.to_local().detach().to(mesh.device_type)
    moved = DTensor.from_local(
        part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return moved.full_tensor()


@torch.no_grad()
def gathered_together(tensors: Sequence[Tensor], dtype: torch.dtype, mesh: DeviceMesh) -> Tensor:
    """The same for several tensors, one after the other, in a single collective operation, which is faster than one for
    each. Ranks hold equally many rows of a tensor, except that the last ones may hold fewer or none."""
    count, shares = mesh.size(), [-(-tensor.shape[0] // mesh.size()) * prod(tensor.shape[1:]) for tensor in tensors]
    own_N = torch.empty(sum(shares), dtype=dtype, device=tensors[0].device)
    for tensor, place in zip(tensors, own_N.split(shares), strict=True):
        assert isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)
        part = tensor.to_local()
        place[: part.numel()].copy_(part.reshape(-1))
    if mesh.device_type == "cpu":
        own_N = in_cpu_memory(own_N)
    if count == 1:
        return own_N
    each = [torch.empty_like(own_N) for _ in range(count)]
    dist.all_gather(each, own_N, mesh.get_group())
    sizes = [tensor.numel() for tensor in tensors]
    whole_N = own_N.new_empty(sum(sizes))
    for whole, share, *came in zip(whole_N.split(sizes), shares, *(one_N.split(shares) for one_N in each), strict=True):
        for place, part in zip(whole.split(share), came, strict=False):  # a rank may have none
            place.copy_(part[: len(place)])
    return whole_N


def part_of(whole: Tensor, like: nn.Parameter) -> Tensor:
    """This rank's part of a tensor that every rank has, divided like a parameter."""
    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _shard(module: PreTrainedModel, mesh: DeviceMesh, fill: Callable[[nn.Module], None], waiting: Waiting) -> None:
    """Each layer is gathered alone. The rest is one unit: sharded alone, tied embeddings would come untied. `fill`
    loads the weights of a unit."""
    layers: Any = getattr(module.base_model, "layers", ())
    for layer in layers:
        fill(layer)
        fully_shard(layer, mesh=mesh)
    fill(module)
    # Gathered weights that outlived a forward pass without gradients would be stale after the next step.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # by default, gradients are means over ranks
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(gather_timed(waiting))  # type: ignore[arg-type]
            part.set_custom_reduce_scatter(reduce_timed(waiting))  # type: ignore[arg-type]
    setattr(module, ENTRY, _call)
    register_fsdp_forward_method(module, ENTRY)


def _nothing_to_load(part: nn.Module) -> None:
    """The weights are there already."""


def _call(function: Callable[..., tuple[Tensor, ...]], *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """FSDP watches what is returned, and would lose sight of a view that is changed in place."""
    return tuple(tensor.clone() for tensor in function(*arguments, **named))
