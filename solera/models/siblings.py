"""Linear layers that take the same input, multiplied as one: decoding is many small products, each a kernel."""

import torch
from torch import Tensor, nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Sibling(nn.Linear):
    """A linear layer that, compiled without gradients, takes its part of the product of all its siblings.

    Each asks for the whole product, and `compiling.ComputedOnce` lets them share it. So nothing is wrong, only slow,
    where a model gives siblings different inputs.
    """

    all_weights: Tensor
    first: int

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not torch.compiler.is_compiling():
            return super().forward(input)
        part = nn.functional.linear(input, self.all_weights)[..., self.first : self.first + self.out_features]
        return part if self.bias is None else part + self.bias


def join(module: nn.Module) -> None:
    """Lay the weights of siblings one after the other in memory. From then on they must be written to in place."""
    for part in module.modules():
        for names in SIBLINGS:
            several = [getattr(part, name, None) for name in names]
            if all(type(linear) is nn.Linear for linear in several):
                _join([linear for linear in several if linear is not None])


def _join(several: list[nn.Linear]) -> None:
    all_weights = torch.cat([linear.weight.detach() for linear in several])
    first = 0
    for linear in several:
        linear.weight.data = all_weights[first : first + linear.out_features]
        linear.__class__ = Sibling
        linear.register_buffer("all_weights", all_weights, persistent=False)
        linear.first = first  # type: ignore[assignment]
        first += linear.out_features
