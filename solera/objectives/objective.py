"""An objective: one composition of advantage, policy term, penalties and aggregation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from solera.config import ObjectiveConfig
from solera.objectives.advantage import ADVANTAGES, Advantage
from solera.objectives.table import find
from solera.objectives.terms import AGGREGATIONS, TERMS, Term, Tokens, kl_loss

Share = tuple[Tensor, Tensor]
"""Numerator and denominator of a mean, so that parts of a batch can be added up."""


@dataclass(frozen=True)
class Objective:
    """What the learner minimises, and what it must supply for it."""

    advantage: Advantage
    term: Callable[[Tokens], Term]
    kl: Callable[[Tokens], Tensor]
    aggregation: Callable[[Tensor], Tensor]
    beta: float
    entropy_bonus: float
    zero_variance_mask: bool

    @property
    def uses_reference(self) -> bool:
        return self.beta > 0

    def loss(self, tokens: Tokens) -> tuple[Tensor, dict[str, Share]]:
        """The micro-batch's part of the loss, and what the objective did, as sums to be added up.

        `Σ_t a_t·(term_t + β·KL_t − η·H_t)`, a_t the aggregation's weight.
        """
        term = self.term(tokens)
        loss_T = term.loss_T
        acting_T = tokens.advantage_T != 0
        one = torch.ones_like(tokens.logp_T).sum()
        shares: dict[str, Share] = {
            "clip/fraction": ((term.silenced_T & acting_T).sum(), acting_T.sum()),
            "policy/entropy": (tokens.entropy_T.detach().sum(), one),
        }
        if self.uses_reference:
            kl_T = self.kl(tokens)
            loss_T = loss_T + self.beta * kl_T
            shares["kl/ref"] = (kl_T.detach().sum(), one)
        if self.entropy_bonus > 0:
            loss_T = loss_T - self.entropy_bonus * tokens.entropy_T
        return (loss_T * tokens.aggregation_T).sum(), shares


def compose(config: ObjectiveConfig) -> Objective:
    """The objective of a resolved config."""
    row = find(config.name)
    assert config.advantage and config.aggregation, "resolve the config first"
    return Objective(
        advantage=ADVANTAGES[config.advantage],
        term=partial(TERMS[row.term], **{name: getattr(config, name) for name in row.constants}),
        kl=partial(kl_loss, kl=str(config.kl), kl_weight=str(config.kl_weight)),
        aggregation=AGGREGATIONS[config.aggregation],
        beta=config.beta or 0.0,
        entropy_bonus=config.entropy_bonus or 0.0,
        zero_variance_mask=bool(config.zero_variance_mask),
    )
