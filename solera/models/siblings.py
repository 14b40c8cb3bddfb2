"""Multiply linear layers with the same input as one: fewer and larger products."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from solera.models import wide

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Together(torch.autograd.Function):
    """The weights of siblings as one matrix, which is where they lie. Gradients are divided among them."""

    @staticmethod
    def forward(ctx: Any, together: Tensor, *weights: Tensor) -> Tensor:
        ctx.lengths = [len(weight) for weight in weights]
        return together.view_as(together)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grad.split(ctx.lengths)


class Family:
    """The weights of siblings, and the product that the first of them leaves for the others."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights
        self.input: Tensor | None = None
        self.whole: Tensor | None = None


class Sibling(nn.Linear):
    """A linear layer that, compiled, takes its part of the product of all its siblings.

    The first one that is called multiplies for all. If a model gives siblings different inputs, the result is still
    right, only slower.
    """

    first: int
    family: Family
    product = staticmethod(nn.functional.linear)

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(input)
        whole = self._whole(input)
        part = whole[..., self.first : self.first + self.out_features]
        return part if self.bias is None else part + self.bias

    def _whole(self, input: Tensor) -> Tensor:
        family, together = self.family, self.weight.all_siblings  # type: ignore[attr-defined]
        if family.input is not input:
            weights = Together.apply(together, *family.weights) if torch.is_grad_enabled() else together
            family.input, family.whole = input, self.product(input, weights)
        whole = family.whole
        if self.first + self.out_features == len(together):  # the last of them
            family.input = family.whole = None
        assert whole is not None
        return whole


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
    family = Family([linear.weight for linear in several])
    for linear, first in zip(several, accumulate(lengths, initial=0), strict=False):
        linear.__class__ = JOINED[type(linear)]
        linear.first, linear.family = first, family  # type: ignore[assignment]


def _lay_out(parameters: list[Any], lengths: list[int]) -> None:
    if all(hasattr(parameter, "all_siblings") for parameter in parameters):
        return
    together = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, place in zip(parameters, together.split(lengths), strict=True):
        parameter.data, parameter.all_siblings = place, together
