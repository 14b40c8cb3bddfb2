"""The reference policy π_ref: frozen, swapped for the current policy every so many batches, or mixed with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from solera.learner.compute_weights import ComputeWeights
from solera.models.adapter import switched_off
from solera.models.language_model import LanguageModel


class Reference:
    """A second set of weights, kept only where the objective uses `ref_logp`. Of a model with adapters the frozen
    reference needs none: it is the same model with them switched off."""

    def __init__(
        self,
        model: LanguageModel,
        period: int | None,
        ema: float | None,
        compute: torch.dtype = torch.float32,
        copy: Callable[[], LanguageModel] | None = None,
        compiled: bool = False,
    ) -> None:
        """`copy` returns a copy of the model that is not trained. A sharded model cannot be copied as others can."""
        self.switched_off = model.adapter is not None and not (period or ema)
        self.model = model if self.switched_off else copy() if copy else model.copy(model.module.dtype)
        self.model.can_take_plans = model.can_take_plans
        self.compute_weights = (
            None if self.switched_off else ComputeWeights(self.model, compute, trained=False, compiled=compiled)
        )
        self.period = period
        self.ema = ema

    @contextmanager
    def scoring(self, learner: ComputeWeights) -> Iterator[ComputeWeights]:
        """What to score with: its own weights, or the learner's without their adapters."""
        with switched_off(learner.model.module) if self.compute_weights is None else nullcontext():
            yield self.compute_weights or learner

    def state(self) -> dict[str, torch.Tensor]:
        if self.switched_off:
            return {}
        return {name: parameter.detach() for name, parameter in self.model.parameters().items()}

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        if self.compute_weights is None:
            return
        for name, parameter in self.model.parameters().items():
            parameter.copy_(state[name])
        self.compute_weights.follow()

    @torch.no_grad()
    def follow(self, model: LanguageModel, version: int) -> None:
        """Move after the learner reached `version`."""
        share = self.ema or (1.0 if self.period and version % self.period == 0 else 0.0)
        if not share or self.compute_weights is None:
            return
        for own, current in zip(self.model.parameters().values(), model.parameters().values(), strict=True):
            own.lerp_(current.detach(), share)
        self.compute_weights.follow()
