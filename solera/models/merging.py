"""Adds LoRA adapters to the weights that they belong to: W + s·B·A. A server does this without the package peft."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

A, B = ".lora_A.default.weight", ".lora_B.default.weight"
"""How the names of a layer's adapters end. They begin with the name of the layer."""
WEIGHT = ".weight"


@dataclass(frozen=True)
class Base:
    """The frozen weights of a model with adapters."""

    tensors: Mapping[str, Tensor]
    """Under the names that they have without adapters."""
    scale: Mapping[str, float]
    """The factor s, by the name of the layer."""


def adapter_shapes(base: Base, sent: list[list[Any]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapters that belong to this base. `sent` is name, shape and more of each that was sent;
    only the rank is taken from it."""
    rank = {name: shape[0] for name, shape, *_ in sent if name.endswith(A)}
    shapes = dict[str, tuple[int, ...]]()
    for layer in base.scale:
        out, into = base.tensors[layer + WEIGHT].shape
        shapes |= {layer + A: (rank.get(layer + A, 0), into), layer + B: (out, rank.get(layer + A, 0))}
    return shapes


@torch.no_grad()
def merge(base: Base, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights, with the adapters added in float32.

    >>> base = Base({"up.weight": torch.ones(1, 2), "norm.weight": torch.zeros(1)}, {"up": 2.0})
    >>> merged = merge(base, {"up" + A: torch.tensor([[1.0, 3.0]]), "up" + B: torch.tensor([[0.5]])})
    >>> merged["up.weight"].tolist(), merged["norm.weight"].tolist()
    ([[2.0, 4.0]], [0.0])
    """
    merged = dict(base.tensors)
    for layer, scale in base.scale.items():
        weight, a, b = merged[layer + WEIGHT], adapters[layer + A].float(), adapters[layer + B].float()
        merged[layer + WEIGHT] = torch.addmm(weight.to(a.device).float(), b, a, alpha=scale).to(weight.dtype)
    return merged
