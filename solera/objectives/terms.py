"""The policy terms: a loss for each token, to be minimised. (docs/formulas.md, sections 3 to 5)

A term is a pure function of the tokens. Its keyword-only parameters are config fields; their defaults come from the
objective's row in `table.py`. ℓ is the policy's log-probability, A the advantage, and ρ = π_θ/α of a token, w of a
response.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solera.objectives.advantage import group_logmeanexp, group_mean
from solera.objectives.ratio import bounded_exp
from solera.objectives.tokens import Responses, Tokens


@dataclass(frozen=True, eq=False)
class Term:
    """A loss for each token, and what the term did to compute it (`None` if the term has no such step).

    `weight_T` is the factor of −A·∇log π. `silenced_T` marks the tokens whose gradient the clip removed because of
    their ratio, `ratio_T`.
    """

    loss_T: Tensor
    weight_T: Tensor | None = None
    silenced_T: Tensor | None = None
    ratio_T: Tensor | None = None


def clipped_surrogate(
    ratio_T: Tensor, low_T: Tensor, high_T: Tensor, advantage_T: Tensor, dual_clip: float | None = None
) -> Term:
    """`−min(ρA, clip(ρ, low, high)·A)`. With a dual clip c, tokens with A < 0 have `−max(min(ρA, clip(ρ)·A), c·A)`.

    Bounds are inclusive: a token on the bound keeps its gradient. (Dual clip: Ye et al., arXiv 1912.09729)
    """
    silenced_T = ((advantage_T > 0) & (ratio_T > high_T)) | ((advantage_T < 0) & (ratio_T < low_T))
    bound_T = torch.where(advantage_T > 0, high_T, low_T)
    if dual_clip is not None:
        beyond_T = (advantage_T < 0) & (torch.maximum(ratio_T, low_T) > dual_clip)
        silenced_T, bound_T = silenced_T | beyond_T, bound_T.masked_fill(beyond_T, dual_clip)
    loss_T = -torch.where(silenced_T, bound_T, ratio_T) * advantage_T
    return Term(loss_T, ratio_T.detach().masked_fill(silenced_T, 0.0), silenced_T, ratio_T.detach())


def clipped_around_one(
    ratio_T: Tensor, epsilon_low: float, epsilon_high: float, advantage_T: Tensor, dual_clip: float | None
) -> Term:
    one_T = torch.ones_like(ratio_T)
    return clipped_surrogate(ratio_T, one_T - epsilon_low, one_T + epsilon_high, advantage_T, dual_clip)


def weighted_likelihood(tokens: Tokens, weight_T: Tensor) -> Tensor:
    """`−sg(W)·A·ℓ`"""
    return -weight_T.detach() * tokens.advantage_T * tokens.logp_T


# The REC family: −sg(W·M)·A·ℓ. (Yao et al.)


def rec(
    tokens: Tokens, *, clip: str, weight: str, epsilon_low: float | None, epsilon_high: float | None,
    ring_low: float | None, ring_high: float | None, weight_temperature: float | None,
    adaptive_temperature: bool | None,
) -> Term:  # fmt: skip
    """`−sg(W·M)·A·ℓ`, where M is the clip and W the weight of a token."""
    ratio_T = tokens.ratio("token").detach() if clip != "none" or weight == "importance" else None
    weight_T = torch.ones_like(tokens.logp_T)
    if weight == "importance":
        assert ratio_T is not None
        weight_T = ratio_T
    elif weight == "exp_advantage":
        weight_T = advantage_weight(tokens.responses, None if adaptive_temperature else weight_temperature)
        weight_T = weight_T[tokens.response_T].to(tokens.logp_T.dtype)
    silenced_T = None
    if ratio_T is not None and clip != "none":
        edges = (epsilon_low, epsilon_high, ring_low, ring_high)
        silenced_T = ~keeps(clip, ratio_T, tokens.advantage_T, *edges)
        weight_T = weight_T.masked_fill(silenced_T, 0.0)
    return Term(weighted_likelihood(tokens, weight_T), weight_T, silenced_T, ratio_T)


def keeps(
    clip: str, ratio_T: Tensor, advantage_T: Tensor, low: float | None, high: float | None, ring_low: float | None,
    ring_high: float | None,
) -> Tensor:  # fmt: skip
    """M of each token, with inclusive bounds.

    `one_side` keeps tokens that have not passed the bound in the direction of their advantage. `two_side` keeps tokens
    within both bounds. `ring` also keeps tokens far outside that the update pulls back.
    """
    assert low is not None and high is not None
    better_T, worse_T = advantage_T >= 0, advantage_T <= 0
    below_high_T, above_low_T = ratio_T <= 1 + high, ratio_T >= 1 - low
    if clip == "one_side":
        return (better_T & below_high_T) | (worse_T & above_low_T)
    inside_T = below_high_T & above_low_T
    if clip == "two_side":
        return inside_T
    assert clip == "ring" and ring_low is not None and ring_high is not None
    return inside_T | (better_T & (ratio_T <= 1 - ring_low)) | (worse_T & (ratio_T >= 1 + ring_high))


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE, HALVINGS = 0.8, 100.0, 20


def advantage_weight(responses: Responses, temperature: float | None) -> Tensor:
    """`exp(A/T)` of each response (RED-Weight). `[B]`

    If `temperature` is `None`, T solves `Σ A·exp(A/T)·n = 0` over the minibatch (adaptive RED-Weight). All weights are
    1 if negatives do not outweigh positives.
    """
    advantage_B = responses.advantage_B
    if temperature is not None:
        return bounded_exp(advantage_B / temperature)
    length_B = responses.length_B.double()
    if (advantage_B * length_B).sum() >= -1e-9 * (advantage_B.abs() * length_B).sum():
        return torch.ones_like(advantage_B)

    def surplus(t: float) -> float:
        return float((advantage_B * bounded_exp(advantage_B / t) * length_B).sum())

    return bounded_exp(advantage_B / _root_of_falling(surplus, LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE))


def _root_of_falling(function: Callable[[float], float], low: float, high: float) -> float:
    """Root of a decreasing function by bisection, or the nearer end of the interval if there is none inside."""
    if function(low) <= 0:
        return low
    if function(high) >= 0:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


# Mirror descent and imitation.


def opmd(tokens: Tokens, *, tau: float) -> Term:
    """`−A·ℓ/(1+τ)`"""
    weight_T = torch.full_like(tokens.logp_T, 1 / (1 + tau))
    return Term(weighted_likelihood(tokens, weight_T), weight_T)


def opmd_kimi(tokens: Tokens, *, tau: float) -> Term:
    """`(r − τ·log Ẑ − τ·Σ(ℓ−f))²` once per response, where Ẑ is the group's mean of exp(r/τ)."""
    responses = tokens.responses
    log_z_B = group_logmeanexp(responses.reward_B / tau, responses.group_B, responses.groups)
    return Term(tokens.once((_kl_shifted_reward(tokens, tau) - tau * log_z_B).square()))


def opmd_pairwise(tokens: Tokens, *, tau: float) -> Term:
    """`Σ_{i<j}(a_i − a_j)²/(2τG)` of a group, a = r − τ·Σ(ℓ−f), computed as `Σ(a_i − ā)²/(2τ)` with ā detached."""
    assert tokens.statistic is not None, "ā is computed over the minibatch"
    return Term(tokens.once((_kl_shifted_reward(tokens, tau) - tokens.statistic).square() / (2 * tau)))


def mean_shifted_reward(tokens: Tokens, *, tau: float) -> Tensor:
    """ā of each response's group, computed over the whole minibatch. `[B]`"""
    responses = tokens.responses
    return group_mean(_kl_shifted_reward(tokens, tau).detach(), responses.group_B, responses.groups)


def _kl_shifted_reward(tokens: Tokens, tau: float) -> Tensor:
    assert tokens.ref_logp_T is not None
    return tokens.responses.reward_B - tau * tokens.total(tokens.logp_T - tokens.ref_logp_T)


def sft(tokens: Tokens) -> Term:
    """`−ℓ`. `Objective.shape` selects the responses whose reward reaches the threshold."""
    return Term(-tokens.logp_T)


# Clipped surrogates.


def ppo(tokens: Tokens, *, epsilon_low: float, epsilon_high: float, dual_clip: float | None = None) -> Term:
    """`−min(ρA, clip(ρ, 1−ε_l, 1+ε_h)·A)`. (Schulman et al., 2017)"""
    return clipped_around_one(tokens.ratio("token"), epsilon_low, epsilon_high, tokens.advantage_T, dual_clip)


def off_policy(tokens: Tokens, *, epsilon: float, centre: str, level: str, dual_clip: float | None = None) -> Term:
    """`−min(ρA, clip(ρ, max(ρ'−ε, 0), ρ'+ε)·A)`, ρ' = 1 or π_k/α. (Mroueh et al., section 4)"""
    ratio_T = tokens.ratio(level)
    centre_T = torch.ones_like(ratio_T) if centre == "one" else tokens.proximal_ratio(level).detach()
    low_T, high_T = (centre_T - epsilon).clamp_min(0), centre_T + epsilon
    return clipped_surrogate(ratio_T, low_T, high_T, tokens.advantage_T, dual_clip)


def gspo(tokens: Tokens, *, epsilon_low: float, epsilon_high: float, dual_clip: float | None = None) -> Term:
    """`−min(sA, clip(s)·A)`, s = exp(mean_t(ℓ−b)) of the response, with the gradient through s. (Zheng et al., 2025)"""
    return clipped_around_one(tokens.ratio("geometric"), epsilon_low, epsilon_high, tokens.advantage_T, dual_clip)


def cispo(tokens: Tokens, *, cap: float) -> Term:
    """`−sg(min(ρ, cap))·A·ℓ`. (MiniMax, 2025)"""
    weight_T = tokens.ratio("token").detach().clamp_max(cap)
    return Term(weighted_likelihood(tokens, weight_T), weight_T)


def topr(tokens: Tokens, *, level: str) -> Term:
    """`−sg(a)·A·ℓ`, with a = 1 where A > 0, else min(w, 1) (`sequence`) or min(ρ, 1) (`token`). (Le Roux et al.)"""
    tapered_T = tokens.ratio(level).detach().clamp_max(1.0)
    weight_T = torch.where(tokens.advantage_T > 0, 1.0, tapered_T)
    return Term(weighted_likelihood(tokens, weight_T), weight_T)


def decoupled(tokens: Tokens, *, epsilon_low: float, epsilon_high: float, dual_clip: float | None = None) -> Term:
    """`−sg(q)·min(uA, clip(u)·A)`, u = π_θ/π_k, q = π_k/α. (Hilton et al., 2022) The dual clip bounds u, not q."""
    return _decoupled(tokens, tokens.proximal_ratio(), epsilon_low, epsilon_high, dual_clip)


def tis(
    tokens: Tokens, *, epsilon_low: float, epsilon_high: float, weight_high: float, dual_clip: float | None = None
) -> Term:
    """`decoupled`, with min(q, weight_high) in place of q."""
    return _decoupled(tokens, tokens.proximal_ratio().clamp_max(weight_high), epsilon_low, epsilon_high, dual_clip)


def mis(
    tokens: Tokens, *, epsilon_low: float, epsilon_high: float, weight_low: float, weight_high: float,
    dual_clip: float | None = None,
) -> Term:  # fmt: skip
    """`decoupled`, with q where weight_low ≤ q ≤ weight_high and 0 elsewhere. (IcePop)"""
    q_T = tokens.proximal_ratio().detach()
    outside_T = (q_T < weight_low) | (q_T > weight_high)
    term = _decoupled(tokens, q_T.masked_fill(outside_T, 0.0), epsilon_low, epsilon_high, dual_clip)
    assert term.silenced_T is not None and term.ratio_T is not None
    judged_T = torch.where(outside_T, q_T, term.ratio_T)
    return Term(term.loss_T, term.weight_T, term.silenced_T | outside_T, judged_T)


def _decoupled(tokens: Tokens, q_T: Tensor, epsilon_low: float, epsilon_high: float, dual_clip: float | None) -> Term:
    q_T = q_T.detach()
    u_T = bounded_exp(tokens.logp_T - tokens.proximal_logp_T)
    term = clipped_around_one(u_T, epsilon_low, epsilon_high, tokens.advantage_T, dual_clip)
    assert term.weight_T is not None
    return Term(q_T * term.loss_T, q_T * term.weight_T, term.silenced_T, term.ratio_T)


def m2po(tokens: Tokens, *, second_moment: float, dual_clip: float | None = None) -> Term:
    """`−ρA`, but 0 for tokens driven away from α whose (log ρ)² exceeds the minibatch's threshold."""
    assert tokens.statistic is not None, "the threshold is computed over the minibatch"
    dropped_T = _driven_away(tokens) & (tokens.log_ratio_T.detach().square() > tokens.statistic)
    return _masked_surrogate(tokens, dropped_T, dual_clip)


def second_moment_threshold(tokens: Tokens, *, second_moment: float) -> Tensor:
    """The largest (log ρ)² to keep so that its mean over the kept candidates is at most `second_moment`."""
    square_T = tokens.log_ratio_T.detach().square()[_driven_away(tokens)].double().sort().values
    if not len(square_T):
        return square_T.new_tensor(torch.inf)
    counts = torch.arange(1, len(square_T) + 1, device=square_T.device)
    last_of_its_value = torch.cat([square_T[1:] > square_T[:-1], torch.ones_like(square_T[:1], dtype=torch.bool)])
    allowed = last_of_its_value & (square_T.cumsum(0) / counts <= second_moment)
    kept = torch.where(allowed, counts, 0).max()
    # Halfway between the last kept and the first dropped value: rounding in a second forward pass then changes neither.
    edges = torch.cat([-square_T[:1] - 1, square_T, square_T[-1:] + 1])
    return (edges[kept] + edges[kept + 1]) / 2


def dppo(tokens: Tokens, *, tolerance: float, dual_clip: float | None = None) -> Term:
    """`−ρA`, but 0 for tokens driven away from α whose probability changed by more than the tolerance."""
    moved_T = (bounded_exp(tokens.logp_T.detach()) - bounded_exp(tokens.behaviour_logp_T)).abs()
    return _masked_surrogate(tokens, (moved_T > tolerance) & _driven_away(tokens), dual_clip)


def sapo(tokens: Tokens, *, tau_positive: float, tau_negative: float) -> Term:
    """`−(4/τ)·σ(τ(ρ−1))·A`, with the gradient through ρ. τ depends on the sign of A. (Gao et al., 2025)"""
    ratio_T, advantage_T = tokens.ratio("token"), tokens.advantage_T
    tau_T = torch.where(advantage_T > 0, torch.full_like(ratio_T, tau_positive), tau_negative)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    weight_T = (4 * gate_T * (1 - gate_T) * ratio_T).detach()
    return Term(-(4 / tau_T) * gate_T * advantage_T, weight_T, None, ratio_T.detach())


def _driven_away(tokens: Tokens) -> Tensor:
    """Tokens that the update would move further away from α: A > 0 and ρ > 1, or A < 0 and ρ < 1."""
    advantage_T, log_ratio_T = tokens.advantage_T, tokens.log_ratio_T.detach()
    return ((advantage_T > 0) & (log_ratio_T > 0)) | ((advantage_T < 0) & (log_ratio_T < 0))


def _masked_surrogate(tokens: Tokens, masked_T: Tensor, dual_clip: float | None) -> Term:
    """`−ρA`, and 0 where masked. With a dual clip c, tokens with A < 0 have `−max(ρA, c·A)`."""
    ratio_T = tokens.ratio("token")
    kept_T, silenced_T = ratio_T.masked_fill(masked_T, 0.0), masked_T
    if dual_clip is not None:
        beyond_T = (tokens.advantage_T < 0) & (kept_T > dual_clip)
        kept_T, silenced_T = kept_T.masked_fill(beyond_T, dual_clip), masked_T | beyond_T
    weight_T = ratio_T.detach().masked_fill(silenced_T, 0.0)
    return Term(-kept_T * tokens.advantage_T, weight_T, silenced_T, ratio_T.detach())


TERMS: dict[str, Callable[..., Term]] = {
    "rec": rec, "opmd": opmd, "opmd_kimi": opmd_kimi, "opmd_pairwise": opmd_pairwise, "sft": sft, "ppo": ppo,
    "off_policy": off_policy, "gspo": gspo, "cispo": cispo, "topr": topr, "decoupled": decoupled, "tis": tis,
    "mis": mis, "m2po": m2po, "dppo": dppo, "sapo": sapo,
}  # fmt: skip
STATISTICS: dict[str, Callable[..., Tensor]] = {"opmd_pairwise": mean_shifted_reward, "m2po": second_moment_threshold}
"""Statistics that a term needs over the whole minibatch, before it is split into micro-batches."""
