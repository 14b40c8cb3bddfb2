"""Multiply linear layers with the same input as one, because decoding consists of many small products."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from solera.models import wide

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Sibling(nn.Linear):
    """A linear layer that, compiled without gradients, takes its part of the product of all its siblings.

    Each layer asks for the whole product, and `compiling.ComputedOnce` lets them share it. If a model gives siblings
    different inputs, the result is still right, only slower.
    """

    first: int
    product = staticmethod(nn.functional.linear)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not torch.compiler.is_compiling():
            return super().forward(input)
        whole = self.product(input, self.weight.all_siblings)  # type: ignore[attr-defined]
        part = whole[..., self.first : self.first + self.out_features]
        return part if self.bias is None else part + self.bias


class WideSibling(Sibling, wide.Wide):
    """The same for a layer that returns float32."""

    product = staticmethod(wide.linear)


JOINED: dict[type[nn.Module], type[Sibling]] = {
    nn.Linear: Sibling, Sibling: Sibling, wide.Wide: WideSibling, WideSibling: WideSibling,
}  # fmt: skip


def join(module: nn.Module) -> None:
    """Lay out the weights of siblings contiguously in memory. From then on they must be written in place."""
    for part in module.modules():
        for names in SIBLINGS:
            several = [getattr(part, name, None) for name in names]
            if all(type(linear) in JOINED for linear in several):
                _join([linear for linear in several if linear is not None])


def _join(several: list[nn.Linear]) -> None:
    """The common storage is kept with the weights, because another module may share them."""
    lengths = [len(linear.weight) for linear in several]
    _lay_out([linear.weight for linear in several], lengths)
    biases = [linear.bias for linear in several]
    if all(bias is not None for bias in biases):
        _lay_out(biases, lengths)
    for linear, first in zip(several, accumulate(lengths, initial=0), strict=False):
        linear.__class__ = JOINED[type(linear)]
        linear.first = first  # type: ignore[assignment]


def _lay_out(parameters: list[Any], lengths: list[int]) -> None:
    if all(hasattr(parameter, "all_siblings") for parameter in parameters):
        return
    together = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, place in zip(parameters, together.split(lengths), strict=True):
        parameter.data, parameter.all_siblings = place, together
