"""Measure how large a model's values are, to decide whether float16 (at most 65,504) can hold them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from solera.models.language_model import LanguageModel

WIDER = {torch.float16: "bfloat16", torch.bfloat16: "float32"}
"""The value of `model.compute` to suggest if values overflow in the current one."""
ROOM = 2.0
"""float16 is chosen only if the model's values can still grow by this factor."""


def fits_float16(number: float) -> bool:
    return number * ROOM <= torch.finfo(torch.float16).max


@torch.no_grad()
def largest(model: LanguageModel, texts: Iterable[tuple[int, ...]]) -> float:
    """Return the largest absolute value among the weights and all inputs and outputs of layer parts on `texts`.

    A few texts are enough: a model's largest values belong to few tokens, mainly the first one, whatever the text.
    """
    found = [parameter.abs().max() for parameter in model.module.parameters()]

    def note(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        several = (*given, *(result if isinstance(result, tuple) else (result,)))
        found.extend(x.abs().max() for x in several if isinstance(x, Tensor) and x.is_floating_point() and x.numel())

    hooks = [part.register_forward_hook(note) for part in model.body.modules()]
    try:
        for text in texts:
            ids = torch.tensor([text], device=model.device)
            model.hidden(ids, torch.arange(len(text), device=model.device)[None])
    finally:
        for hook in hooks:
            hook.remove()
    return float(torch.stack([each.float() for each in found]).max())
