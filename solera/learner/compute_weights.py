"""Master weights, which are trained, and the weights that forward and backward passes compute with.

They are the same, or the second are a copy in lower precision on a GPU that takes packed texts. After every backward
pass, gradients are added from the copy to the masters in float32. After every optimiser step, the copy takes the
masters' values. With `learn.memory = "lean"` there is one set of weights, in bfloat16.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from solera.errors import SoleraError
from solera.learner.graphs import RecordedBody, most_places, waits_for_host
from solera.learner.rows import MicroBatch
from solera.models.language_model import LanguageModel
from solera.models.memory import RECORDING, free_bytes, set_aside

LOSS_SCALE = 2.0**15
"""What a loss is multiplied by before a backward pass in float16, in which a mean over many tokens would become 0. If
a gradient overflows, it is computed again with a smaller scale."""
MOST_TOKENS = 32_768
"""Most tokens of one forward and backward pass. A GPU is not faster with more."""
CALM = 64
"""Steps without an overflow after which the scale is doubled again."""
FEWEST_TOKENS = 256
"""If not even these fit, something else than the learner's activations takes the memory."""
WORTHWHILE_TOKENS = 4096
"""If fewer fit into one pass, activations are recomputed, because the GPU would wait for the host. An inference, not a
measurement: SmolLM2's times at 15 and 4 passes (benchmarks/RESULTS.md) differ by 60 ms a pass, in which an H200
computes about 3,300 tokens of a model with 1.56 billion weights."""


class ComputeWeights:
    """`model` is what is called. `masters` are what is trained, saved and synced."""

    def __init__(
        self,
        masters: LanguageModel,
        compute: torch.dtype,
        *,
        trained: bool,
        compiled: bool = False,
        records: bool = False,
    ) -> None:
        self.masters = masters
        self.model = masters.for_compute(compute)
        self.compute = compute
        self.separate = self.model is not masters
        self.compiled = compiled and self.model.device.type == "cuda" and self.model.takes_plans
        self._at_once = sys.maxsize
        self.recomputes = False
        """Whether the backward pass recomputes activations, layer by layer, from the input of each layer."""
        if compute == torch.float16 and not self.separate:
            raise SoleraError(
                "model.compute = float16 needs a GPU and a model that takes packed texts: use bfloat16 or float32"
            )
        passes_float16 = compute == torch.float16 or self.model.is_wide
        self.loss_scale = self._most_scale = LOSS_SCALE if passes_float16 else 1.0
        self._calm = 0
        self._to: list[Tensor] = list(self.model.parameters().values())
        self._from: list[Tensor] = list(masters.parameters().values())
        if self.separate:
            for parameter in self.model.parameters().values():
                parameter.requires_grad_(trained)
        if self.compiled:
            self.model.compile_layers()
        whole = self.separate or self.model.is_wide  # else autocast computes
        records = records and trained and self.compiled and whole
        self.padded = most_places(self.model, self.bytes_per_token(recomputes=False)) if records else 0
        """Places up to which micro-batches are padded, so that a recorded pass can take them."""
        self._recorded = RecordedBody(self.model, self.padded) if self.padded else None
        if self._recorded is not None:
            set_aside(self._recorded, int(self.padded * self.bytes_per_token(recomputes=False)))

    @property
    def recorded(self) -> RecordedBody | None:
        """Passes of this update that can be replayed."""
        return None if self.recomputes else self._recorded

    @property
    def may_replay(self) -> bool:
        """Whether padded micro-batches of this update are replayed once their size is recorded."""
        return self.padded > 0 and not self.recomputes

    def scores_apart(self, tokens: int) -> bool:
        """Whether responses that are only scored get a pass of their own, without a gradient, or places in the training
        pass of so many tokens. One more pass costs nothing but its work on the GPU, unless that waits for the host."""
        return self.padded > 0 or not waits_for_host(self.model, tokens)

    def record(self, micros: list[MicroBatch]) -> bool:
        """Record the passes of these micro-batches if their sizes come often. False if memory ran out; then nothing is
        recorded from now on."""
        try:
            if self.recorded is not None:
                self.recorded.record(micros)
            return True
        except torch.OutOfMemoryError:
            self._recorded = None
            return False

    def autocast(self) -> AbstractContextManager[object]:
        """Lower precision for masters without a copy."""
        if self.separate or self.model.is_wide or self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.model.device.type, self.compute)

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the masters' values."""
        if self.separate:
            torch._foreach_copy_(self._to, self._from)

    @property
    def can_hold(self) -> bool:
        """Whether there is room to compute with other values for a while."""
        return self.separate or self.model.device.type == "cpu"

    @contextmanager
    def holding(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """Compute with these values until the block ends. Masters that compute themselves then get their own back."""
        own = self.model.parameters()
        kept = {} if self.separate else {name: tensor.detach().clone() for name, tensor in own.items()}
        try:
            self._set(own, tensors)
            yield own
        finally:
            self._set(own, kept.items())
            self.follow()

    @torch.no_grad()
    def _set(self, own: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            own[name].copy_(tensor)

    @torch.no_grad()
    def pass_on_gradients(self, scale: float) -> None:
        """Add the copy's gradients, of a loss times `scale`, to the masters' gradients."""
        if not self.separate:
            return
        given: list[Any] = [pair for pair in zip(self._to, self._from, strict=True) if pair[0].grad is not None]
        first = [(own, master) for own, master in given if master.grad is None]
        later = [(own, master) for own, master in given if master.grad is not None]
        if later:
            torch._foreach_add_([master.grad for _, master in later], [own.grad for own, _ in later], alpha=1 / scale)
        if first:
            grads = [torch.empty_like(master) for _, master in first]
            torch._foreach_copy_(grads, [own.grad for own, _ in first])
            torch._foreach_div_(grads, scale)
            for (_, master), grad in zip(first, grads, strict=True):
                master.grad = grad
        for own, _ in given:
            own.grad = None

    def left(self, scale: float) -> float:
        """What the masters' gradients are still multiplied by after the backward pass of a loss times `scale`."""
        return 1.0 if self.separate else scale

    def keep_scale(self, scale: float) -> None:
        """Begin the next step with the scale that worked in this one, and now and then with twice as much."""
        self._calm = self._calm + 1 if scale >= self.loss_scale else 0
        grows = self._calm >= CALM and scale < self._most_scale
        self.loss_scale, self._calm = (scale * 2, 0) if grows else (scale, self._calm)

    def state(self) -> dict[str, float]:
        """What a resumed run needs to compute as this one would: numbers that earlier batches have changed."""
        return {"loss_scale": self.loss_scale, "calm": self._calm, "at_once": self._at_once}

    def restore(self, numbers: Mapping[str, float]) -> None:
        self.loss_scale = min(float(numbers["loss_scale"]), self._most_scale)
        self._calm, self._at_once = int(numbers["calm"]), int(numbers["at_once"])

    @property
    def can_recompute(self) -> bool:
        """Whether recomputing activations is possible and saves memory. With two layers it saves none."""
        saves = self.bytes_per_token(recomputes=True) < self.bytes_per_token(recomputes=False)
        return saves and bool(self.model.module.supports_gradient_checkpointing)

    def recompute(self, activations: bool) -> None:
        """Recompute activations in backward passes from now on, or keep them."""
        if activations == self.recomputes:
            return
        self.recomputes = activations
        module = self.model.module
        if activations:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            module.gradient_checkpointing_disable()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """transformers recomputes in training mode only, and keeps no cache then. Evaluation needs one."""
        module = self.model.module
        if self.recomputes:
            module.train()
        try:
            yield
        finally:
            if self.recomputes:
                module.eval()

    def should_recompute(self, longest: int) -> bool:
        """Whether too little memory is free to keep the activations of a text of this length, or of a worthwhile
        number of tokens. A text cannot be cut."""
        if self._free() is None or not self.can_recompute:
            return False
        return self._fitting(recomputes=False) < max(longest, WORTHWHILE_TOKENS)

    def tokens_at_once(self, wished: int | None) -> int:
        """Tokens of one forward and backward pass: as wished, or as many as fit and can be recorded. Fewer once memory
        ran out."""
        most = self.padded or MOST_TOKENS
        return min(wished or max(1024, min(most, self._fitting(self.recomputes))), self._at_once)

    def _fitting(self, recomputes: bool) -> int:
        """Tokens whose activations fit into two thirds of the GPU's free memory. The last third is for logits and
        gradients."""
        free = self._free()
        return 16_384 if free is None else min(MOST_TOKENS, int(free * 2 / 3 / self.bytes_per_token(recomputes)))

    def _free(self) -> int | None:
        """Free bytes of a GPU, without those for gradients that are not allocated yet."""
        if self.model.device.type != "cuda":
            return None
        return free_bytes(self.model.device) - self._missing_gradients()

    def bytes_per_token(self, recomputes: bool) -> float:
        """Memory for the activations of a token, estimated from the sizes of a usual layer. If they are recomputed: the
        input of every layer, and the activations of one layer with their gradients."""
        config = self.model.module.config.get_text_config()
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        width = 5.5 * config.hidden_size + 2.5 * inner if self.compiled else 10 * config.hidden_size + 7 * inner
        layers = config.num_hidden_layers
        kept = (layers + 2) * config.hidden_size + 2 * width if recomputes else layers * width
        return kept * (4 if self.model.is_wide else self.compute.itemsize)

    def _missing_gradients(self) -> int:
        """Bytes of gradients that are not allocated yet, of what a backward pass computes with. In bfloat16 they take
        as much as the weights."""
        return sum(own.nbytes for own in self._to if own.requires_grad and own.grad is None)

    @property
    def missing_on_masters(self) -> int:
        """Bytes of gradients that the first update will allocate and keep, on masters that have a copy."""
        return sum(own.nbytes for own in self._from if own.requires_grad and own.grad is None) if self.separate else 0

    def release(self) -> None:
        """Give back what an interrupted pass has left, and what recorded passes hold: memory is short."""
        self._recorded = None
        for own in self._to:
            own.grad = None
        if self.model.device.type == "cuda":
            with RECORDING:
                torch.cuda.empty_cache()

    def take_at_most(self, tokens: int) -> None:
        """Never take more tokens at once from now on."""
        self._at_once = tokens
