"""A language model whose weights are divided among ranks with FSDP2."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from solera.models.language_model import LanguageModel

T = TypeVar("T", bound=tuple[Tensor, ...])
ENTRY = "run_with_weights"
"""Name of the method of the outermost module around which FSDP gathers the embedding, the last norm and the head."""


class ShardedModel(LanguageModel):
    """Every rank makes it from the same model, and then keeps its own part of each weight."""

    def __init__(self, model: LanguageModel, mesh: DeviceMesh) -> None:
        _shard(model.module, model.body, mesh)
        super().__init__(model.module, model.adapter)  # lists the parameters, which are others now
        self.takes_any_mask = model.takes_any_mask

    def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        return getattr(self.module, ENTRY)(function, self, *arguments, **named)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(whole: Tensor, like: nn.Parameter) -> Tensor:
    """This rank's part of a tensor that every rank has, divided like a parameter."""
    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _shard(module: nn.Module, body: nn.Module, mesh: DeviceMesh) -> None:
    """Each layer is gathered alone. The rest is one unit: sharded alone, tied embeddings would come untied."""
    layers: Any = getattr(body, "layers", ())
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # Gathered weights that outlived a forward pass without gradients would be stale after the next step.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # by default, gradients are means over ranks
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    setattr(module, ENTRY, _call)
    register_fsdp_forward_method(module, ENTRY)


def _call(function: Callable[..., tuple[Tensor, ...]], *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """FSDP watches what is returned, and would lose sight of a view that is changed in place."""
    return tuple(tensor.clone() for tensor in function(*arguments, **named))
