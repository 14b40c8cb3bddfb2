"""torch's settings for models so small that preparing an operation takes longer than the operation."""

import torch
from torch import nn

SMALL_MODEL = 5_000_000
"""Below this number of parameters, a second CPU thread makes a step slower."""


def is_small(module: nn.Module) -> bool:
    """Counts all parameters, also those that adapters do not train."""
    return sum(parameter.numel() for parameter in module.parameters()) < SMALL_MODEL


def suit(module: nn.Module) -> None:
    """Multiply matrices in the way that is fastest for a model of this size, from now on in this process."""
    if is_small(module):
        torch.backends.mkldnn.set_flags(_enabled=False)  # its set-up takes longer than a small product
