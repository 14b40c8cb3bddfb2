"""How large a model's numbers grow: whether float16, which ends at 65,504, has room for them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from solera.models.language_model import LanguageModel

WIDER = {torch.float16: "bfloat16", torch.bfloat16: "float32"}
"""What `model.compute` may be set to where numbers are lost."""
ROOM = 2.0
"""float16 is taken for models whose numbers may still grow by that."""


def fits_float16(number: float) -> bool:
    return number * ROOM <= torch.finfo(torch.float16).max


@torch.no_grad()
def largest(model: LanguageModel, texts: Iterable[tuple[int, ...]]) -> float:
    """The largest absolute number among the weights and all that enters or leaves a layer's parts on reading `texts`.

    A few texts tell: a model's largest numbers belong to few tokens, above all to the first, in whatever is read.
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
