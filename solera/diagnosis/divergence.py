"""How far a policy is from the one that wrote the data, estimated on responses written by α. (FORMULAS, section 8)"""

from torch import Tensor

from solera.objectives.ratio import bounded_exp, response_sum


def divergence(log_ratio_T: Tensor, response_T: Tensor, stands_for_B: Tensor) -> dict[str, float]:
    """Divergence of π from α, given `log π − log α` of each token, and how many responses each response stands for.

    With w of a response and ρ of a token: `tv_sequence = mean (1−w)₊` · `tv_token = mean (1−ρ)₊` ·
    `kl = mean −log w` (KL(α‖π)) · `chi2 = mean (w−1)²` · `ess = (Σw)²/(N·Σw²)`. On α's own policy: 0, 0, 0, 0, 1.
    """
    assert log_ratio_T.shape == response_T.shape
    assert log_ratio_T.ndim == 1
    assert len(stands_for_B) > 0
    count_B, count_T = stands_for_B.double(), stands_for_B.double()[response_T]
    log_w_B = response_sum(log_ratio_T.double(), response_T, len(count_B))
    w_B, ratio_T = bounded_exp(log_w_B), bounded_exp(log_ratio_T.double())
    share_B = count_B / count_B.sum()
    return {
        "divergence/tv_sequence": (share_B @ (1 - w_B).clamp_min(0)).item(),
        "divergence/tv_token": (count_T @ (1 - ratio_T).clamp_min(0) / count_T.sum()).item(),
        "divergence/kl": -(share_B @ log_w_B).item(),
        "divergence/chi2": (share_B @ (w_B - 1).square()).item(),
        "divergence/ess": ((share_B @ w_B).square() / (share_B @ w_B.square())).item(),
    }
