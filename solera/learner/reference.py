"""The reference policy π_ref: frozen, swapped for the current policy every so many batches, or mixed with it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from solera.models.language_model import LanguageModel


class Reference:
    """A second set of weights, kept only where the objective uses `ref_logp`. Of a model with adapters the frozen
    reference needs none: it is the same model with them switched off."""

    def __init__(self, model: LanguageModel, period: int | None, ema: float | None) -> None:
        self._adapter = model.adapter if not (period or ema) else None
        self.model = model if self._adapter else model.copy(model.module.dtype)
        self.period = period
        self.ema = ema

    @contextmanager
    def scoring(self) -> Iterator[LanguageModel]:
        """The model to score with."""
        with self._adapter.off() if self._adapter else nullcontext():
            yield self.model

    def state(self) -> dict[str, torch.Tensor]:
        if self._adapter:
            return {}
        return {name: parameter.detach() for name, parameter in self.model.parameters().items()}

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.parameters().items() if state else ():
            parameter.copy_(state[name])

    @torch.no_grad()
    def follow(self, model: LanguageModel, version: int) -> None:
        """Move after the learner reached `version`."""
        share = self.ema or (1.0 if self.period and version % self.period == 0 else 0.0)
        if not share:
            return
        for own, current in zip(self.model.parameters().values(), model.parameters().values(), strict=True):
            own.lerp_(current.detach(), share)
