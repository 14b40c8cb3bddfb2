"""The loss of a whole batch given as padded arrays. The learner computes the same loss in micro-batches."""

from dataclasses import replace

import torch
from torch import Tensor

from solera.errors import SoleraError
from solera.objectives.objective import Objective
from solera.objectives.tokens import BehaviourLogp, ProximalLogp, Responses, Tokens


def padded_loss(
    objective: Objective,
    *,
    logp_BT: Tensor,
    mask_BT: Tensor,
    reward_B: Tensor,
    group_B: Tensor,
    behaviour_logp_BT: Tensor | None = None,
    proximal_logp_BT: Tensor | None = None,
    ref_logp_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    uniform_B: Tensor | None = None,
    limit: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a batch, differentiable in `logp_BT` and `entropy_BT`, and the objective's metrics.

    NaN marks a missing reward and an unknown `behaviour_logp_BT`. If `behaviour_logp_BT` or `proximal_logp_BT` is
    omitted, π_θ is used. `limit` defaults to the width of the arrays. Values outside `mask_BT` are never read. The loss
    is 0 if no response is left to learn from.
    """
    if torch.isinf(reward_B).any():
        raise SoleraError(f"rewards of responses {torch.isinf(reward_B).nonzero().flatten().tolist()} are infinite")
    compared_B = ~reward_B.isnan() & mask_BT.any(dim=1)
    number_B = torch.unique(group_B, return_inverse=True)[1]
    groups = int(number_B.max()) + 1 if len(number_B) else 0
    uniform_C = None if uniform_B is None else uniform_B[compared_B]
    shaped = objective.shape(reward_B[compared_B].double(), number_B[compared_B], groups, uniform_C)
    row_B = compared_B.nonzero().flatten()[shaped.taken_B]
    if not len(row_B):
        return logp_BT[mask_BT][:0].sum(), {}
    length_B = mask_BT[row_B].sum(dim=1).to(logp_BT.dtype)
    responses = Responses(
        advantage_B=shaped.advantage_B[shaped.taken_B],
        reward_B=reward_B[row_B].to(logp_BT.dtype),
        length_B=length_B,
        group_B=number_B[row_B],
        groups=groups,
        weight_B=objective.aggregation(length_B, number_B[row_B], limit or logp_BT.shape[1]),
    )
    place_T = mask_BT[row_B].nonzero(as_tuple=True)

    def take(value_BT: Tensor | None) -> Tensor:
        return logp_T.detach() if value_BT is None else value_BT[row_B][place_T]

    logp_T = logp_BT[row_B][place_T]
    proximal_T = ProximalLogp(take(proximal_logp_BT).detach())
    tokens = Tokens(
        logp_T=logp_T,
        behaviour_logp_T=_known(objective, BehaviourLogp(take(behaviour_logp_BT).detach()), proximal_T),
        proximal_logp_T=proximal_T,
        entropy_T=torch.zeros_like(logp_T) if entropy_BT is None else take(entropy_BT),
        response_T=place_T[0],
        responses=responses,
        ref_logp_T=None if ref_logp_BT is None else take(ref_logp_BT).detach(),
    )
    loss, account = objective.loss(replace(tokens, statistic=objective.statistic_of([tokens])))
    return loss, account.metrics() | {"responses/dropped": shaped.dropped_B.double().mean().item()}


def _known(objective: Objective, behaviour_logp_T: BehaviourLogp, proximal_logp_T: ProximalLogp) -> BehaviourLogp:
    if objective.uses_behaviour and objective.unknown_behaviour == "refuse" and behaviour_logp_T.isnan().any():
        raise SoleraError("the objective needs behaviour log-probabilities: set unknown_behaviour = proximal")
    return objective.known_behaviour(behaviour_logp_T, proximal_logp_T)
