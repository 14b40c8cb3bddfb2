"""Float32 master weights, and the weights that forward and backward passes use.

They are the same, or on a GPU a copy in lower precision that takes packed texts: gradients go from the copy to the
masters after every backward pass and are summed there in float32; the copy follows the masters after every optimiser
step.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from solera.models.language_model import LanguageModel


class Working:
    """`model` is what is called; `masters` are what is trained, saved and synced."""

    def __init__(self, masters: LanguageModel, compute: torch.dtype, *, trained: bool, compiled: bool = False) -> None:
        self.masters = masters
        self.model = masters.for_compute(compute)
        self.compute = compute
        self.separate = self.model is not masters
        self._to: list[Tensor] = list(self.model.parameters().values())
        self._from: list[Tensor] = list(masters.parameters().values())
        if self.separate:
            for parameter in self.model.parameters().values():
                parameter.requires_grad_(trained)
            if compiled and self.model.device.type == "cuda":
                self.model.compile_layers()

    def autocast(self) -> AbstractContextManager[object]:
        """Lower precision for masters that have no copy in it."""
        if self.separate or self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.model.device.type, self.compute)

    @torch.no_grad()
    def follow(self) -> None:
        """Take the masters' values."""
        if self.separate:
            torch._foreach_copy_(self._to, self._from)

    @torch.no_grad()
    def pass_on_gradients(self) -> None:
        """Add what a backward pass left on the copy to the masters' gradients."""
        if not self.separate:
            return
        for own, master in zip(self._to, self._from, strict=True):
            if own.grad is not None:
                master.grad = own.grad.float() if master.grad is None else master.grad.add_(own.grad)
                own.grad = None


def micro_batch_tokens(model: LanguageModel) -> int:
    """Tokens whose activations fit into half of the GPU's free memory, by the sizes of a usual layer."""
    if model.device.type != "cuda":
        return 16_384
    config = model.module.config.get_text_config()
    width = 8 * config.hidden_size + 5 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    each = config.num_hidden_layers * width * torch.bfloat16.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return max(1024, min(49_152, (free + cached) // 2 // each))
