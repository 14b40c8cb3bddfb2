"""How far a policy is from the one that wrote the data, estimated on responses written by α. (FORMULAS, section 8)"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

from solera.objectives.ratio import EXPONENT_LIMIT
from solera.records import age_band

Chosen = npt.NDArray[np.bool_] | slice
ALL = slice(None)


class Apart:
    """π and α on responses of α: w of each response, and sums over its tokens of what each adds to a divergence.

    Given `log π − log α` of each token, and how many responses each response stands for.
    """

    def __init__(self, log_ratio_T: Tensor, response_T: Tensor, stands_for_B: Tensor) -> None:
        assert log_ratio_T.shape == response_T.shape
        assert log_ratio_T.ndim == 1
        assert len(stands_for_B) > 0
        value_T, place_T, count = log_ratio_T.double().numpy(), response_T.numpy(), len(stands_for_B)
        self.count_B = stands_for_B.double().numpy()
        self.length_B = np.bincount(place_T, minlength=count)
        self.w_B = _bounded_exp(np.bincount(place_T, value_T, count).astype(np.float64, copy=False))
        self.short_B = np.bincount(place_T, np.maximum(1 - _bounded_exp(value_T), 0), count)
        self.kl_B = np.bincount(place_T, token_kl(value_T), count)

    def figures(self, chosen: Chosen = ALL) -> dict[str, float]:
        """Divergences over the chosen responses. With w of a response and ρ of a token:

        `tv_sequence = mean (1−w)₊` · `tv_token = mean (1−ρ)₊` · `kl = mean Σ_t (ρ − 1 − log ρ)` (KL(α‖π)) ·
        `chi2 = mean (w−1)²` · `ess = (Σw)²/(N·Σw²)`. On α's own policy: 0, 0, 0, 0, 1.
        """
        count_B, w_B = self.count_B[chosen], self.w_B[chosen]
        share_B = count_B / count_B.sum()
        return {
            "tv_sequence": float(share_B @ np.maximum(1 - w_B, 0)),
            "tv_token": float(count_B @ self.short_B[chosen] / (count_B @ self.length_B[chosen])),
            "kl": float(share_B @ self.kl_B[chosen]),
            "chi2": float(share_B @ (w_B - 1) ** 2),
            "ess": float((share_B @ w_B) ** 2 / (share_B @ w_B**2)),
        }

    def by(self, label_B: Sequence[str | None]) -> dict[str, dict[str, float]]:
        """The same for each label; responses without one are left out."""
        labels, known = np.array([label or "" for label in label_B]), dict.fromkeys(filter(None, label_B))
        return {label: self.figures(labels == label) for label in sorted(known)}


@cache
def age_label(age: int | None) -> str | None:
    """What a divergence by age is named after."""
    return None if age is None else f"age_{age_band(age)}"


def token_kl(log_ratio_T: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`ρ − 1 − log ρ` of each token: what it adds to KL(α‖π), never below 0.

    Given what came before it, a token of α has `E[ρ] = 1`, so that `E[ρ − 1 − log ρ] = E[−log ρ]`, the KL of its own
    distribution. These add up to the KL of whole responses. The same form of w would need `E[w] = 1` over a few
    responses, which its heavy tail spoils.
    """
    return np.maximum(_bounded_exp(log_ratio_T) - 1 - log_ratio_T, 0)


def _bounded_exp(exponent: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.exp(np.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT))
