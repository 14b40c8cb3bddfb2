"""An objective is composed of data shaping, advantage, policy term, penalties and aggregation."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from solera.config import ObjectiveConfig
from solera.errors import SoleraError
from solera.objectives.advantage import ADVANTAGES, Advantage, red_drop, zero_variance
from solera.objectives.aggregation import AGGREGATIONS, Aggregation
from solera.objectives.penalties import REGULARISERS, kl_loss
from solera.objectives.table import find, needs_behaviour, needs_reference, resolve
from solera.objectives.terms import STATISTICS, TERMS, Term
from solera.objectives.token_statistics import TokenStatistics
from solera.objectives.tokens import BehaviourLogp, ProximalLogp, Tokens


@dataclass(frozen=True, eq=False)
class Shaped:
    """Which responses of a batch take part, their advantages, and which of them RED-Drop removed. `[B]` each."""

    taken_B: Tensor
    advantage_B: Tensor
    dropped_B: Tensor


@dataclass(frozen=True)
class Objective:
    """What the learner minimises, and which inputs it needs.

    `advantage` is `None` if the term uses the rewards directly.
    """

    advantage: Advantage | None
    term: Callable[[Tokens], Term]
    aggregation: Aggregation
    statistic: Callable[[Tokens], Tensor] | None
    kl: Callable[[Tokens], Tensor]
    beta: float
    regulariser: Callable[[Tokens], Tensor] | None
    regulariser_weight: float
    entropy_bonus: float
    zero_variance_mask: bool
    drop: str
    keep_denominator: bool
    threshold: float | None
    uses_reference: bool
    uses_behaviour: bool
    unknown_behaviour: str
    refill: bool
    ref_period: int | None
    ref_ema: float | None
    by_turn: bool = False
    """Whether each turn of an episode has an advantage of its own."""

    def shape(
        self,
        reward_B: Tensor,
        group_B: Tensor,
        groups: int,
        uniform_B: Tensor | None = None,
        flat_P: Tensor | None = None,
    ) -> Shaped:
        """Apply the zero-variance mask, RED-Drop and the reward threshold, then compute advantages over the rest.

        `uniform_B` holds one random number per response, for RED-Drop. `flat_P` says which groups the mask removes; by
        default, those of equal rewards.
        """
        taken_B = torch.ones_like(group_B, dtype=torch.bool)
        dropped_B = torch.zeros_like(taken_B)
        if self.zero_variance_mask:
            taken_B = ~(zero_variance(reward_B, group_B, groups) if flat_P is None else flat_P)[group_B]
        if self.drop != "none":
            assert uniform_B is not None, "RED-Drop needs one uniform number per response"
            dropped_B = taken_B & red_drop(reward_B, group_B, groups, uniform_B, worst=self.drop == "worst")
        if self.threshold is not None:
            taken_B = taken_B & (reward_B >= self.threshold)
        left_B = taken_B & ~dropped_B
        advantage_B = torch.zeros_like(reward_B)
        if self.advantage is not None:
            advantage_B[left_B] = self.advantage(reward_B[left_B], group_B[left_B], groups)
        return Shaped(taken_B if self.keep_denominator else left_B, advantage_B, dropped_B)

    @property
    def compares(self) -> bool:
        """Whether a group of equal rewards has no policy gradient."""
        if self.zero_variance_mask or self.advantage is None:
            return self.zero_variance_mask
        equal_B, group_B = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
        return bool(self.advantage(equal_B, group_B, 1).abs().max() < 1e-9)  # some differ from 0 by rounding

    def known_behaviour(self, behaviour_logp_T: BehaviourLogp, proximal_logp_T: ProximalLogp) -> BehaviourLogp:
        """`b`; where it was not recorded (NaN), `p` if the config allows this substitution."""
        if self.unknown_behaviour != "proximal":
            return behaviour_logp_T
        return BehaviourLogp(torch.where(behaviour_logp_T.isnan(), proximal_logp_T, behaviour_logp_T))

    def statistic_of(self, parts: list[Tokens]) -> Tensor | None:
        """The statistic that the term needs over the minibatch, given as micro-batches. It carries no gradient."""
        if self.statistic is None:
            return None
        with torch.no_grad():
            return self.statistic(Tokens.join(parts))

    def loss(self, tokens: Tokens) -> tuple[Tensor, TokenStatistics]:
        """The micro-batch's part of the loss, and what the objective did to its tokens.

        `Σ_t a_t·(term_t + λ·R_t + β·KL_t − η·H_t)`, where a_t is the aggregation's weight.
        """
        term = self.term(tokens)
        weight_T = tokens.responses.weight_B[tokens.response_T]
        loss_T = term.loss_T
        if self.regulariser is not None:
            loss_T = loss_T + self.regulariser_weight * self.regulariser(tokens)
        seen = {"policy/entropy": tokens.entropy_T}
        if self.beta > 0:
            kl_T = self.kl(tokens)
            loss_T = loss_T + self.beta * kl_T
            seen["kl/ref"] = kl_T
        if self.entropy_bonus > 0:
            loss_T = loss_T - self.entropy_bonus * tokens.entropy_T
        return (loss_T * weight_T).sum(), TokenStatistics.of(term, tokens.advantage_T, weight_T, seen)


def compose(config: ObjectiveConfig) -> Objective:
    """The objective of a resolved config."""
    row = find(config.name)
    assert config.aggregation and config.drop, "resolve the config first"
    statistic = STATISTICS.get(row.term)
    return Objective(
        advantage=_filled(ADVANTAGES[config.advantage], config) if config.advantage else None,
        term=_filled(TERMS[row.term], config),
        aggregation=AGGREGATIONS[config.aggregation],
        statistic=_filled(statistic, config) if statistic else None,
        kl=partial(kl_loss, kl=str(config.kl), kl_weight=str(config.kl_weight)),
        beta=config.beta or 0.0,
        regulariser=REGULARISERS.get(config.regulariser or "none"),
        regulariser_weight=config.regulariser_weight or 0.0,
        entropy_bonus=config.entropy_bonus or 0.0,
        zero_variance_mask=bool(config.zero_variance_mask),
        drop=config.drop,
        keep_denominator=bool(config.keep_denominator),
        threshold=config.threshold,
        uses_reference=needs_reference(config),
        uses_behaviour=needs_behaviour(config),
        unknown_behaviour=config.unknown_behaviour or "refuse",
        refill=bool(config.refill),
        ref_period=config.ref_period,
        ref_ema=config.ref_ema,
        by_turn=config.credit == "turn",
    )


def custom_objective(
    term: Callable[[Tokens], Term], *, uses_behaviour: bool = True, unknown_behaviour: str = "refuse", **fields: Any
) -> Objective:
    """An objective built around your own policy term.

    `fields` are the fields that every objective has (advantage, aggregation, zero_variance_mask, drop, regulariser,
    beta …), with the defaults of `reinforce`. The term can use everything in `Tokens`; to get `ref_logp_T`, set beta
    above 0. Pass `uses_behaviour=False` if the term never reads `behaviour_logp_T`. It then accepts text from any
    source.
    """
    known = compose(resolve(ObjectiveConfig("reinforce", **fields)))
    if unknown_behaviour not in ("refuse", "proximal"):
        raise SoleraError(f"unknown_behaviour is {unknown_behaviour!r}; it must be refuse or proximal")
    needs = uses_behaviour or known.uses_behaviour
    return dataclasses.replace(known, term=term, uses_behaviour=needs, unknown_behaviour=unknown_behaviour)


def _filled(function: Callable[..., Any], config: ObjectiveConfig) -> Callable[..., Any]:
    """The function with its keyword-only parameters filled from the config fields of the same names."""
    parameters = inspect.signature(function).parameters.values()
    return partial(function, **{p.name: getattr(config, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY})
