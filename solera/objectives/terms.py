"""The parts an objective is composed of: clipped surrogates, KL estimators, aggregations. Losses are minimised.

Everything lives on a flat vector of the tokens the policy answers for: padding and masked tokens are not in it, so no
formula has to multiply them away.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solera.objectives.ratio import bounded_exp, sequence_ratio, token_ratio


@dataclass(frozen=True)
class Tokens:
    """What an objective sees of a micro-batch. Vectors are `[T]`; `response_T` numbers the response of each token.

    `aggregation_T` is each token's weight in the loss, counted over the whole minibatch before it was cut.
    """

    logp_T: Tensor
    behaviour_logp_T: Tensor
    proximal_logp_T: Tensor
    advantage_T: Tensor
    aggregation_T: Tensor
    response_T: Tensor
    responses: int
    entropy_T: Tensor
    ref_logp_T: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("behaviour_logp_T", "proximal_logp_T", "advantage_T", "aggregation_T", "response_T", "entropy_T"):
            assert getattr(self, name).shape == self.logp_T.shape, f"{name} and logp_T differ in shape"
        assert self.ref_logp_T is None or self.ref_logp_T.shape == self.logp_T.shape

    def ratio(self, level: str) -> Tensor:
        """π_θ over α, of each token or of its whole response."""
        return self._against_behaviour(self.logp_T, level)

    def proximal_ratio(self, level: str) -> Tensor:
        """π_k over α: where this batch found the policy."""
        return self._against_behaviour(self.proximal_logp_T, level)

    def _against_behaviour(self, logp_T: Tensor, level: str) -> Tensor:
        if level == "sequence":
            return sequence_ratio(logp_T, self.behaviour_logp_T, self.response_T, self.responses)
        return token_ratio(logp_T, self.behaviour_logp_T)


@dataclass(frozen=True)
class Term:
    """A loss for each token, and which tokens' policy gradient the clip silenced."""

    loss_T: Tensor
    silenced_T: Tensor


def clipped_surrogate(ratio_T: Tensor, low_T: Tensor, high_T: Tensor, advantage_T: Tensor) -> Term:
    """`−min(ρA, clip(ρ, low, high)·A)`; bounds are inclusive: on the edge the gradient is whole."""
    silenced_T = ((advantage_T > 0) & (ratio_T > high_T)) | ((advantage_T < 0) & (ratio_T < low_T))
    bound_T = torch.where(advantage_T > 0, high_T, low_T)
    return Term(-torch.where(silenced_T, bound_T, ratio_T) * advantage_T, silenced_T)


def ppo(tokens: Tokens, *, epsilon_low: float, epsilon_high: float) -> Term:
    """`−min(ρA, clip(ρ, 1−ε_l, 1+ε_h)·A)`. (Schulman et al., 2017)"""
    ratio_T = tokens.ratio("token")
    one_T = torch.ones_like(ratio_T)
    return clipped_surrogate(ratio_T, one_T - epsilon_low, one_T + epsilon_high, tokens.advantage_T)


def off_policy(tokens: Tokens, *, epsilon: float, centre: str, level: str) -> Term:
    """`−min(ρA, clip(ρ, max(ρ'−ε, 0), ρ'+ε)·A)`, ρ' = 1 or π_k/α. (Mroueh et al., section 4)"""
    ratio_T = tokens.ratio(level)
    centre_T = torch.ones_like(ratio_T) if centre == "one" else tokens.proximal_ratio(level).detach()
    return clipped_surrogate(ratio_T, (centre_T - epsilon).clamp_min(0), centre_T + epsilon, tokens.advantage_T)


def k1(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`−d`, d = f − ℓ."""
    return logp_T - ref_logp_T


def k2(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`d²/2`, d = f − ℓ."""
    return (ref_logp_T - logp_T).square() / 2


def k3(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`exp(d) − d − 1`, d = f − ℓ."""
    d_T = ref_logp_T - logp_T
    return bounded_exp(d_T) - d_T - 1


def kl_loss(tokens: Tokens, *, kl: str, kl_weight: str) -> Tensor:
    """KL(π‖π_ref) as a loss for each token, on responses written by α.

    Weighted by ρ the gradient is that of the divergence: through ρ for k1 and k3; k2 already has the right gradient
    under its own policy's samples and takes ρ as a number. Unweighted k3 has the gradient of KL(π_ref‖π).
    """
    assert tokens.ref_logp_T is not None, "the KL term needs ref_logp"
    estimate_T = KL_ESTIMATORS[kl](tokens.logp_T, tokens.ref_logp_T)
    if kl_weight == "none":
        return estimate_T
    ratio_T = tokens.ratio("token")
    return (ratio_T.detach() if kl == "k2" else ratio_T) * estimate_T


def token_mean(length_B: Tensor) -> Tensor:
    """Weight of each token of a response: `1/Σ n`, so that all tokens count alike."""
    return torch.full_like(length_B, 1.0) / length_B.sum()


def sequence_mean(length_B: Tensor) -> Tensor:
    """Weight of each token of a response: `1/(B·n_i)`, so that all responses count alike."""
    return 1.0 / (len(length_B) * length_B)


TERMS: dict[str, Callable[..., Term]] = {"ppo": ppo, "off_policy": off_policy}
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {"token_mean": token_mean, "sequence_mean": sequence_mean}
