"""Distance between a policy and α, which wrote the data, estimated on α's responses. (docs/formulas.md, section 8)"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from solera.objectives.ratio import EXPONENT_LIMIT
from solera.records import age_band

Chosen = npt.NDArray[np.bool_] | slice
ALL = slice(None)


class LogRatios:
    """`log π − log α` of each token of responses that α wrote, and the divergences that follow from them.

    `response_T` is the number of each token's response, and `stands_for_B` how many responses each one stands for.
    """

    def __init__(
        self,
        log_ratio_T: npt.NDArray[np.floating],
        response_T: npt.NDArray[np.int64],
        stands_for_B: npt.NDArray[np.floating],
    ) -> None:
        assert log_ratio_T.shape == response_T.shape
        assert log_ratio_T.ndim == 1
        assert len(stands_for_B) > 0
        value_T, count = log_ratio_T.astype(np.float64), len(stands_for_B)
        self.count_B = stands_for_B.astype(np.float64)
        self.length_B = np.bincount(response_T, minlength=count)
        self.w_B = _bounded_exp(np.bincount(response_T, value_T, count).astype(np.float64, copy=False))
        self.short_B = np.bincount(response_T, np.maximum(1 - _bounded_exp(value_T), 0), count)
        self.kl_B = np.bincount(response_T, token_kl(value_T), count)

    def divergences(self, chosen: Chosen = ALL) -> dict[str, float]:
        """Divergences over the chosen responses. With w of a response and ρ of a token:

        `tv_sequence = mean (1−w)₊` · `tv_token = mean (1−ρ)₊` · `kl = mean Σ_t (ρ − 1 − log ρ)` (KL(α‖π)) ·
        `chi2 = mean (w−1)²` · `ess = (Σw)²/(N·Σw²)`. If π = α, they are 0, 0, 0, 0, 1.
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

    def divergences_by(self, label_B: Sequence[str | None]) -> dict[str, dict[str, float]]:
        """The same over the responses of each label. Responses without a label are left out."""
        labels, known = np.array([label or "" for label in label_B]), dict.fromkeys(filter(None, label_B))
        return {label: self.divergences(labels == label) for label in sorted(known)}


@cache
def age_label(age: int | None) -> str | None:
    """The name of an age band in the metrics."""
    return None if age is None else f"age_{age_band(age)}"


def token_kl(log_ratio_T: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`ρ − 1 − log ρ` of each token: its contribution to KL(α‖π), never negative.

    Given its prefix, a token written by α has `E[ρ] = 1`, so `E[ρ − 1 − log ρ] = E[−log ρ]`: the KL of the token's
    distribution. The sum over tokens is the KL of whole responses. The same form with w would need the mean of w to be
    near 1, which a few responses cannot give because w has a heavy tail.
    """
    return np.maximum(_bounded_exp(log_ratio_T) - 1 - log_ratio_T, 0)


def _bounded_exp(exponent: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.exp(np.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT))
