"""A second implementation of every objective in docs/formulas.md, sections 1 to 6: slow, token by token, in float64.

Nothing here is shared with `solera`. Autograd gives the gradient, so a quantity that must carry none is made a plain
number (`float`), and one that must is a tensor of no dimension.
"""

from typing import Any

import torch
from torch import Tensor

from tests.objectives.oracle_groups import Member, Response, log_mean_exp, taking_part
from tests.objectives.oracle_names import TABLE, complete

__all__ = ["TABLE", "Response", "clip_fraction", "loss"]


# ------------------------------------------------ section 2: the ratios


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def exp_clamped(x: Tensor) -> Tensor:
    """exp(x), x held to ±20 in value while its gradient passes."""
    value = min(max(x.item(), -20.0), 20.0)
    return torch.exp(value + (x - x.detach()))


def behaviour(response: Response, t: int, options: dict[str, Any]) -> float:
    if response.behaviour is not None:
        return response.behaviour[t]
    if options["unknown_behaviour"] == "proximal":
        return response.proximal[t]
    raise ValueError("the behaviour policy is unknown")


def log_rho(response: Response, t: int, options: dict[str, Any]) -> Tensor:
    return response.logp[t] - behaviour(response, t, options)


def log_w(response: Response, options: dict[str, Any]) -> Tensor:
    total = number(0.0)
    for t in response.tokens:
        total = total + log_rho(response, t, options)
    return total


def rho(response: Response, t: int, options: dict[str, Any]) -> Tensor:
    return exp_clamped(log_rho(response, t, options))


def s(response: Response, options: dict[str, Any]) -> Tensor:
    return exp_clamped(log_w(response, options) / response.n)


def w(response: Response, options: dict[str, Any]) -> Tensor:
    return exp_clamped(log_w(response, options))


def u(response: Response, t: int) -> Tensor:
    return exp_clamped(response.logp[t] - response.proximal[t])


def q(response: Response, t: int, options: dict[str, Any]) -> float:
    return exp_clamped(number(response.proximal[t] - behaviour(response, t, options))).item()


def q_sequence(response: Response, options: dict[str, Any]) -> float:
    total = 0.0
    for t in response.tokens:
        total += response.proximal[t] - behaviour(response, t, options)
    return exp_clamped(number(total)).item()


# ---------------------- sections 3 to 5: policy terms, each (loss of the token, silenced)

Term = tuple[Tensor, bool]


def surrogate(ratio: Tensor, low: float, high: float, A: float, options: dict[str, Any]) -> Term:
    """−min(ratio·A, clip(ratio, low, high)·A): a constant where the clip acts."""
    clipped = min(max(ratio.item(), low), high)
    if clipped * A < ratio.item() * A:
        return dual_clipped((number(-clipped * A), True), A, options)
    return dual_clipped((-ratio * A, False), A, options)


def dual_clipped(term: Term, A: float, options: dict[str, Any]) -> Term:
    """Where A < 0 the term is at least c·A before its sign: a loss of at most −c·A, a constant where that binds."""
    c = options["dual_clip"]
    if c is None or A >= 0 or -term[0].item() >= c * A:
        return term
    return number(-c * A), True


def rec_keeps(ratio: float, A: float, options: dict[str, Any]) -> bool:
    """M of section 3."""
    low, high = 1 - options["epsilon_low"], 1 + options["epsilon_high"]
    far_low, far_high = 1 - options["ring_low"], 1 + options["ring_high"]
    if options["clip"] == "one_side":
        return (A >= 0 and ratio <= high) or (A <= 0 and ratio >= low)
    if options["clip"] == "two_side":
        return low <= ratio <= high
    if options["clip"] == "ring":
        return low <= ratio <= high or (A >= 0 and ratio <= far_low) or (A <= 0 and ratio >= far_high)
    return True


def rec(member: Member, t: int, temperature: float | None, options: dict[str, Any]) -> Term:
    response, A = member.response, member.advantage
    W = 1.0
    if options["weight"] == "importance":
        W = rho(response, t, options).item()
    if options["weight"] == "exp_advantage" and temperature is not None:
        W = exp_clamped(number(A / temperature)).item()
    keeps = options["clip"] == "none" or rec_keeps(rho(response, t, options).item(), A, options)
    M = 1.0 if keeps else 0.0
    return -W * M * A * response.logp[t], not keeps


def rec_temperature(members: list[Member], options: dict[str, Any]) -> float | None:
    """T of RED-Weight; None: no weights."""
    if not options["adaptive_temperature"]:
        return options["weight_temperature"]

    def balance(T: float) -> float:
        return sum(m.advantage * exp_clamped(number(m.advantage / T)).item() * m.response.n for m in members)

    total = sum(m.advantage * m.response.n for m in members)
    size = sum(abs(m.advantage) * m.response.n for m in members)
    if total >= -1e-9 * size:
        return None
    low, high = 0.8, 100.0
    if balance(low) < 0:  # it falls with T, so the root lies below
        return low
    if balance(high) > 0:
        return high
    for _ in range(20):
        middle = (low + high) / 2
        if balance(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def off_policy(member: Member, t: int, options: dict[str, Any]) -> Term:
    response = member.response
    if options["level"] == "token":
        ratio = rho(response, t, options)
        centre = q(response, t, options) if options["centre"] == "proximal" else 1.0
    else:
        ratio = w(response, options)
        centre = q_sequence(response, options) if options["centre"] == "proximal" else 1.0
    epsilon = options["epsilon"]
    return surrogate(ratio, max(centre - epsilon, 0.0), centre + epsilon, member.advantage, options)


def topr(member: Member, t: int, options: dict[str, Any]) -> Term:
    response, A = member.response, member.advantage
    a = 1.0
    if A <= 0:
        ratio = w(response, options) if options["level"] == "sequence" else rho(response, t, options)
        a = min(ratio.item(), 1.0)
    return -a * A * response.logp[t], False


def decoupled(member: Member, t: int, options: dict[str, Any]) -> Term:
    weight = q(member.response, t, options)
    zeroed = False
    if options["term"] == "tis":
        weight = min(weight, options["weight_high"])
    if options["term"] == "mis":
        zeroed = not options["weight_low"] <= weight <= options["weight_high"]
        weight = 0.0 if zeroed else weight
    low, high = 1 - options["epsilon_low"], 1 + options["epsilon_high"]
    loss, clipped = surrogate(u(member.response, t), low, high, member.advantage, options)
    return weight * loss, zeroed or clipped


def carries_further(A: float, ratio: float) -> bool:
    return (A > 0 and ratio > 1) or (A < 0 and ratio < 1)


def m2po_bound(members: list[Member], options: dict[str, Any]) -> float:
    """The largest (log ρ)² that a candidate may have: largest ones go, equal ones together, until the mean fits."""
    squares = []
    for member in members:
        for t in member.response.tokens:
            if carries_further(member.advantage, rho(member.response, t, options).item()):
                squares.append(log_rho(member.response, t, options).item() ** 2)
    while squares and sum(squares) / len(squares) > options["second_moment"]:
        largest = max(squares)
        squares = [square for square in squares if square != largest]
    return max(squares, default=-1.0)


def m2po(member: Member, t: int, bound: float, options: dict[str, Any]) -> Term:
    ratio = rho(member.response, t, options)
    square = log_rho(member.response, t, options).item() ** 2
    if carries_further(member.advantage, ratio.item()) and square > bound:
        return number(0.0), True
    return dual_clipped((-ratio * member.advantage, False), member.advantage, options)


def dppo(member: Member, t: int, options: dict[str, Any]) -> Term:
    response = member.response
    ratio = rho(response, t, options)
    now = exp_clamped(response.logp[t]).item()
    then = exp_clamped(number(behaviour(response, t, options))).item()
    if abs(now - then) > options["tolerance"] and carries_further(member.advantage, ratio.item()):
        return number(0.0), True
    return dual_clipped((-ratio * member.advantage, False), member.advantage, options)


def sapo(member: Member, t: int, options: dict[str, Any]) -> Term:
    ratio = rho(member.response, t, options)
    tau = options["tau_positive"] if member.advantage > 0 else options["tau_negative"]
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * member.advantage, False


def policy_term(  # noqa: PLR0911
    member: Member, t: int, temperature: float | None, bound: float, options: dict[str, Any]
) -> Term:
    term, response, A = options["term"], member.response, member.advantage
    low, high = 1 - options["epsilon_low"], 1 + options["epsilon_high"]
    if term == "rec":
        return rec(member, t, temperature, options)
    if term == "ppo":
        return surrogate(rho(response, t, options), low, high, A, options)
    if term == "off_policy":
        return off_policy(member, t, options)
    if term == "gspo":
        return surrogate(s(response, options), low, high, A, options)
    if term == "cispo":
        return -min(rho(response, t, options).item(), options["cap"]) * A * response.logp[t], False
    if term == "topr":
        return topr(member, t, options)
    if term in ("decoupled", "tis", "mis"):
        return decoupled(member, t, options)
    if term == "m2po":
        return m2po(member, t, bound, options)
    if term == "dppo":
        return dppo(member, t, options)
    if term == "sapo":
        return sapo(member, t, options)
    if term == "opmd":
        return -A * response.logp[t] / (1 + options["tau"]), False
    if term == "sft":
        return -response.logp[t], False
    raise ValueError(term)


# ------------------------------------------------ what is added: regulariser, KL, entropy bonus


def token_regulariser(response: Response, t: int, options: dict[str, Any]) -> Tensor:
    if options["regulariser"] == "forward_kl":
        return -response.logp[t]
    if options["regulariser"] == "k2_token":
        return log_rho(response, t, options) ** 2
    return number(0.0)


def kl(response: Response, t: int, options: dict[str, Any]) -> Tensor:
    d = response.ref[t] - response.logp[t]
    if options["kl"] == "k1":
        estimate = -d
    elif options["kl"] == "k2":
        estimate = d**2 / 2
    else:
        estimate = exp_clamped(d) - d - 1
    if options["kl_weight"] == "none":
        return estimate
    weight = rho(response, t, options)
    return (weight.detach() if options["kl"] == "k2" else weight) * estimate


# ------------------------------------------------ the losses


def statistics(members: list[Member], options: dict[str, Any]) -> tuple[float | None, float]:
    """What is taken over the whole minibatch: the temperature of RED-Weight and m2po's bound."""
    temperature = rec_temperature(members, options) if options["weight"] == "exp_advantage" else None
    bound = m2po_bound(members, options) if options["term"] == "m2po" else 0.0
    return temperature, bound


def response_loss(member: Member, temperature: float | None, bound: float, options: dict[str, Any]) -> Tensor:
    """Σ m·loss of one response."""
    response = member.response
    total = number(0.0)
    for t in response.tokens:
        total = total + policy_term(member, t, temperature, bound, options)[0]
        if options["regulariser"] in ("forward_kl", "k2_token"):
            total = total + options["regulariser_weight"] * token_regulariser(response, t, options)
        if options["beta"]:
            total = total + options["beta"] * kl(response, t, options)
        if options["entropy_bonus"]:
            total = total - options["entropy_bonus"] * response.entropy[t]
    if options["regulariser"] == "k2_sequence":
        total = total + options["regulariser_weight"] * 0.5 * log_w(response, options) ** 2
    return total


def aggregate(sums: list[Tensor], lengths: list[int], limit: int, aggregation: str) -> Tensor:
    total = number(0.0)
    for value, n in zip(sums, lengths, strict=True):
        total = total + (value / n if aggregation == "sequence_mean" else value)
    B = len(sums)
    divisor = {"token_mean": sum(lengths), "sequence_mean": B, "sequence_sum": B, "fixed_length": B * limit}
    return total / divisor[aggregation]


def drift(response: Response) -> Tensor:
    """D = Σ m(ℓ−f)."""
    total = number(0.0)
    for t in response.tokens:
        total = total + (response.logp[t] - response.ref[t])
    return total


def opmd_kimi(groups: list[list[Member]], tau: float) -> Tensor:
    total, B = number(0.0), 0
    for members in groups:
        log_Z = log_mean_exp([member.response.reward for member in members], tau) / tau
        for member in members:
            total = total + (member.response.reward - tau * log_Z - tau * drift(member.response)) ** 2
            B += 1
    return total / B


def opmd_pairwise(groups: list[list[Member]], tau: float) -> Tensor:
    total = number(0.0)
    for members in groups:
        a = [member.response.reward - tau * drift(member.response) for member in members]
        for i in range(len(a)):
            for j in range(i + 1, len(a)):
                total = total + (a[i] - a[j]) ** 2 / (2 * tau * len(a))
    return total / len(groups)


def loss(name: str, groups: list[list[Response]], *, limit: int, **overrides: Any) -> Tensor | None:
    """The loss of a minibatch; None where nothing is left of it."""
    options = complete(name, overrides)
    parts = taking_part(groups, options)
    if not parts:
        return None
    if name == "opmd_kimi":
        return opmd_kimi(parts, options["tau"])
    if name == "opmd_pairwise":
        return opmd_pairwise(parts, options["tau"])
    members = [member for part in parts for member in part]
    temperature, bound = statistics(members, options)
    sums = [response_loss(member, temperature, bound, options) for member in members]
    return aggregate(sums, [member.response.n for member in members], limit, options["aggregation"])


def clip_fraction(name: str, groups: list[list[Response]], *, limit: int, **overrides: Any) -> float:
    """Among tokens that take part with A ≠ 0, the share whose policy term the clip silences; 0 of none is 0."""
    del limit
    options = complete(name, overrides)
    if options["advantage"] == "–":
        return 0.0
    members = [member for part in taking_part(groups, options) for member in part]
    temperature, bound = statistics(members, options)
    silenced, counted = 0, 0
    for member in members:
        if member.advantage == 0:
            continue
        for t in member.response.tokens:
            counted += 1
            silenced += policy_term(member, t, temperature, bound, options)[1]
    return silenced / counted if counted else 0.0
