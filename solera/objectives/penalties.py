"""Losses added to a policy term for each token: KL to the reference policy, and regularisers towards the data."""

from collections.abc import Callable

from torch import Tensor

from solera.objectives.ratio import bounded_exp
from solera.objectives.tokens import Tokens


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

    With `kl_weight = "importance"` the expected gradient is that of KL(π‖π_ref). For k1 and k3 the gradient passes
    through ρ. k2 already has the right gradient on-policy, so its ρ is detached. Unweighted k3 has the gradient of
    KL(π_ref‖π).
    """
    assert tokens.ref_logp_T is not None, "the KL term needs ref_logp"
    estimate_T = KL_ESTIMATORS[kl](tokens.logp_T, tokens.ref_logp_T)
    if kl_weight == "none":
        return estimate_T
    ratio_T = tokens.ratio("token")
    return (ratio_T.detach() if kl == "k2" else ratio_T) * estimate_T


def forward_kl(tokens: Tokens) -> Tensor:
    """`−ℓ`: imitate the data."""
    return -tokens.logp_T


def k2_token(tokens: Tokens) -> Tensor:
    """`(ℓ − b)²`"""
    return tokens.log_ratio_T.square()


def k2_sequence(tokens: Tokens) -> Tensor:
    """`½(Σ_t (ℓ − b))²`, counted once per response."""
    return tokens.once(tokens.total(tokens.log_ratio_T).square() / 2)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
REGULARISERS: dict[str, Callable[[Tokens], Tensor]] = {
    "forward_kl": forward_kl,
    "k2_token": k2_token,
    "k2_sequence": k2_sequence,
}
