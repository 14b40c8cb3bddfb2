"""What an objective sees: a flat vector of the tokens the policy answers for, and the responses they belong to.

Padding and masked tokens are not in it, so no formula has to multiply them away.
"""

from dataclasses import dataclass
from typing import NewType

import torch
from torch import Tensor

from solera.objectives.ratio import bounded_exp, response_sum

BehaviourLogp = NewType("BehaviourLogp", Tensor)
"""`log α`, as whoever wrote a token recorded it."""
ProximalLogp = NewType("ProximalLogp", Tensor)
"""`log π_k`, as the learner scores it before a batch. Only `Objective.known_behaviour` makes the other of it."""


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses of a minibatch (`_B`), whole groups of them: what is constant in the policy.

    `weight_B` is the aggregation's weight of each token of a response, counted before the minibatch is cut. Advantages
    are float64, or sums of them that are 0 would not be.
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


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a micro-batch, `[T]` each; `response_T` says which response of the minibatch a token belongs to.

    A response's tokens are all here or none. `statistic` is what the term asked to know of the whole minibatch.
    """

    logp_T: Tensor
    behaviour_logp_T: BehaviourLogp
    proximal_logp_T: ProximalLogp
    entropy_T: Tensor
    response_T: Tensor
    responses: Responses
    ref_logp_T: Tensor | None = None
    statistic: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("behaviour_logp_T", "proximal_logp_T", "entropy_T", "response_T"):
            assert getattr(self, name).shape == self.logp_T.shape, f"{name} and logp_T differ in shape"
        assert self.ref_logp_T is None or self.ref_logp_T.shape == self.logp_T.shape

    @classmethod
    def join(cls, parts: "list[Tokens]") -> "Tokens":
        """The micro-batches of one minibatch as one."""

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
        )

    @property
    def advantage_T(self) -> Tensor:
        return self.responses.advantage_B[self.response_T].to(self.logp_T.dtype)

    @property
    def log_ratio_T(self) -> Tensor:
        """`ℓ − b`"""
        return self.logp_T - self.behaviour_logp_T

    def ratio(self, level: str) -> Tensor:
        """π_θ over α: ρ of each token, s (`geometric`) or w (`sequence`) of its whole response."""
        return self._exp(self.log_ratio_T, level)

    def proximal_ratio(self, level: str = "token") -> Tensor:
        """π_k over α, where this batch found the policy: q of each token, or of its whole response."""
        return self._exp(self.proximal_logp_T - self.behaviour_logp_T, level)

    def total(self, value_T: Tensor) -> Tensor:
        """Sum over each response. `[T] -> [B]`"""
        return response_sum(value_T, self.response_T, len(self.responses.length_B))

    def once(self, value_B: Tensor) -> Tensor:
        """A loss of each response, spread over its tokens, so that it counts once in their sum. `[B] -> [T]`"""
        return (value_B / self.responses.length_B.clamp_min(1))[self.response_T]

    def _exp(self, exponent_T: Tensor, level: str) -> Tensor:
        if level == "token":
            return bounded_exp(exponent_T)
        sum_B = self.total(exponent_T)
        if level == "geometric":
            sum_B = sum_B / self.responses.length_B.clamp_min(1)
        return bounded_exp(sum_B)[self.response_T]
