"""The input of an objective: a flat vector of the tokens that the policy wrote, and the responses they belong to.

It contains no padding and no masked tokens, so no formula has to multiply them by 0.
"""

from dataclasses import dataclass
from typing import NewType

import torch
from torch import Tensor

from solera.objectives.ratio import bounded_exp, response_sum

BehaviourLogp = NewType("BehaviourLogp", Tensor)
"""`log α`, recorded when the token was sampled."""
ProximalLogp = NewType("ProximalLogp", Tensor)
"""`log π_k`, computed by the learner before a batch. Only `Objective.known_behaviour` makes it `BehaviourLogp`."""


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses of a minibatch (`_B`), in whole groups, with everything that is constant in the policy.

    `weight_B` is the aggregation's weight for each token of a response, computed before the minibatch is split.
    Advantages are float64 so that sums which should be 0 are 0.
    """

    advantage_B: Tensor
    reward_B: Tensor
    length_B: Tensor
    group_B: Tensor
    groups: int
    weight_B: Tensor

    def __post_init__(self) -> None:
        for name in ("reward_B", "length_B", "group_B", "weight_B"):
            assert getattr(self, name).shape == self.advantage_B.shape, f"{name} and advantage_B differ in shape"

    def to(self, device: torch.device) -> "Responses":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Responses(**moved, groups=self.groups)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a micro-batch, `[T]` each. `response_T` is the index of a token's response in the minibatch.

    A micro-batch holds either all tokens of a response or none. `statistic` is the value that the term needs over the
    whole minibatch (see `STATISTICS` in `terms.py`).
    """

    logp_T: Tensor
    behaviour_logp_T: BehaviourLogp
    proximal_logp_T: ProximalLogp
    entropy_T: Tensor
    response_T: Tensor
    responses: Responses
    ref_logp_T: Tensor | None = None
    statistic: Tensor | None = None
    turn_advantage_T: Tensor | None = None
    """The advantage of each token's turn, in place of that of its response (`objective.credit`)."""

    def __post_init__(self) -> None:
        for name in ("behaviour_logp_T", "proximal_logp_T", "entropy_T", "response_T"):
            assert getattr(self, name).shape == self.logp_T.shape, f"{name} and logp_T differ in shape"
        for value_T in (self.ref_logp_T, self.turn_advantage_T):
            assert value_T is None or value_T.shape == self.logp_T.shape

    @classmethod
    def join(cls, parts: "list[Tokens]") -> "Tokens":
        """Concatenate the micro-batches of one minibatch."""

        def together(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        return cls(
            together("logp_T"),
            BehaviourLogp(together("behaviour_logp_T")),
            ProximalLogp(together("proximal_logp_T")),
            together("entropy_T"),
            together("response_T"),
            parts[0].responses,
            None if parts[0].ref_logp_T is None else together("ref_logp_T"),
            turn_advantage_T=None if parts[0].turn_advantage_T is None else together("turn_advantage_T"),
        )

    def to(self, device: torch.device) -> "Tokens":
        moved = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor | Responses)}
        return Tokens(**{**vars(self), **moved})

    @property
    def advantage_T(self) -> Tensor:
        if self.turn_advantage_T is not None:
            return self.turn_advantage_T.to(self.logp_T.dtype)
        return self.responses.advantage_B[self.response_T].to(self.logp_T.dtype)

    @property
    def log_ratio_T(self) -> Tensor:
        """`ℓ − b`"""
        return self.logp_T - self.behaviour_logp_T

    def ratio(self, level: str) -> Tensor:
        """π_θ/α: ρ of each token (`token`), or s (`geometric`) or w (`sequence`) of its response."""
        return self._exp(self.log_ratio_T, level)

    def proximal_ratio(self, level: str = "token") -> Tensor:
        """π_k/α: q of each token, or of its whole response. It does not change during the batch."""
        return self._exp(self.proximal_logp_T - self.behaviour_logp_T, level)

    def total(self, value_T: Tensor) -> Tensor:
        """Sum over each response. `[T] -> [B]`"""
        return response_sum(value_T, self.response_T, len(self.responses.length_B))

    def once(self, value_B: Tensor) -> Tensor:
        """Spread a loss per response over its tokens, so that it counts once in their sum. `[B] -> [T]`"""
        return (value_B / self.responses.length_B.clamp_min(1))[self.response_T]

    def _exp(self, exponent_T: Tensor, level: str) -> Tensor:
        if level == "token":
            return bounded_exp(exponent_T)
        sum_B = self.total(exponent_T)
        if level == "geometric":
            sum_B = sum_B / self.responses.length_B.clamp_min(1)
        return bounded_exp(sum_B)[self.response_T]
