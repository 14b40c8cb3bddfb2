"""How far a policy is from the one that wrote the data, estimated on responses written by α. (FORMULAS, section 8)"""

from torch import Tensor

from solera.objectives.ratio import bounded_exp, response_sum


def divergence(log_ratio_T: Tensor, response_T: Tensor, responses: int) -> dict[str, float]:
    """Divergence of π from α, given `log π − log α` of each token.

    With w of a response and ρ of a token: `tv_sequence = mean (1−w)₊` · `tv_token = mean (1−ρ)₊` ·
    `kl = mean −log w` (KL(α‖π)) · `chi2 = mean (w−1)²` · `ess = (Σw)²/(N·Σw²)`. On α's own policy: 0, 0, 0, 0, 1.
    """
    assert log_ratio_T.shape == response_T.shape
    assert log_ratio_T.ndim == 1
    assert responses > 0
    log_w_B = response_sum(log_ratio_T.double(), response_T, responses)
    w_B, ratio_T = bounded_exp(log_w_B), bounded_exp(log_ratio_T.double())
    return {
        "divergence/tv_sequence": (1 - w_B).clamp_min(0).mean().item(),
        "divergence/tv_token": (1 - ratio_T).clamp_min(0).mean().item(),
        "divergence/kl": -log_w_B.mean().item(),
        "divergence/chi2": (w_B - 1).square().mean().item(),
        "divergence/ess": (w_B.sum().square() / (responses * w_B.square().sum())).item(),
    }
