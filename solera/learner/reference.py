"""The reference policy π_ref: frozen, swapped for the current policy every so many batches, or mixed with it."""

import torch

from solera.learner.working import Working
from solera.models.language_model import LanguageModel


class Reference:
    """A second set of weights, loaded only where the objective uses `ref_logp`."""

    def __init__(
        self, model: LanguageModel, period: int | None, ema: float | None, compute: torch.dtype = torch.float32
    ) -> None:
        self.model = model.copy(model.module.dtype)
        self.model.can_take_plans = model.can_take_plans
        self.working = Working(self.model, compute, trained=False)
        self.period = period
        self.ema = ema

    def state(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.parameters().items()}

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.parameters().items():
            parameter.copy_(state[name])
        self.working.follow()

    @torch.no_grad()
    def follow(self, model: LanguageModel, version: int) -> None:
        """Move after the learner reached `version`."""
        share = self.ema or (1.0 if self.period and version % self.period == 0 else 0.0)
        if not share:
            return
        for own, current in zip(self.model.parameters().values(), model.parameters().values(), strict=True):
            own.lerp_(current.detach(), share)
        self.working.follow()
