"""Why log ρ = log π_θ − log α is not 0: older weights, the engine's arithmetic, a truncated sampler.

(docs/formulas.md, section 8)
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from solera.objectives.ratio import EXPONENT_LIMIT

Mask = npt.NDArray[np.bool_]


class Mismatch:
    """Measures how much engine and learner disagree with the same weights. Warns once if the difference is large.

    On tokens of age 0 the policy is π_a itself, so all of `log π − b` is the engine's error.
    """

    def __init__(self, tolerance: float, say: Callable[[str], None]) -> None:
        self.tolerance = tolerance
        self.say = say
        self.engine: float | None = None
        """KL of the engine's policy from the learner's with the same weights, in nats per token: measured on the last
        batch with tokens of age 0."""
        self._warned = False

    def measure(
        self, log_ratio_T: npt.NDArray[np.floating], part_T: npt.NDArray[np.int64], fresh_P: npt.NDArray[np.bool_]
    ) -> dict[str, float]:
        """`mismatch/logp`: mean of |log π_a − b| over the tokens of age 0, where there are any."""
        error_T = np.abs(log_ratio_T if fresh_P.all() else log_ratio_T[fresh_P[part_T]])
        if not len(error_T):
            return {}
        # Use torch's mean. numpy's adds in another order, and a resumed run must continue bit for bit.
        mean = torch.from_numpy(error_T).double().mean().item()
        if not mean <= self.tolerance and not self._warned:
            self._warned = True
            self.say(
                f"engine and learner disagree about fresh responses by {mean:.2g} nats per token on average; rounding "
                f"explains up to {self.tolerance:.2g}: check for a different temperature, chat template or precision "
                "in the engine, because ratios and divergences include this error"
            )
        return {"mismatch/logp": mean}

    def by_cause(
        self,
        log_ratio_T: npt.NDArray[np.floating],
        part_T: npt.NDArray[np.int64],
        ages: Sequence[int | None],
        truncated_P: npt.NDArray[np.bool_],
        stands_for_P: npt.NDArray[np.floating],
    ) -> dict[str, float]:
        """The KL per token from the policy's own authors, divided into `lag`, `engine` and `truncation`.

        A part (`_P`) of a response has one age and one sampler. Parts without an age are left out: their author is
        another model. Empty as long as the engine's share was never measured.
        """
        value_T, parts = log_ratio_T.astype(np.float64), len(ages)
        own_P = np.array([age is not None for age in ages])
        age_P = np.array([-1 if age is None else age for age in ages])
        tokens_P = np.bincount(part_T, minlength=parts) * stands_for_P
        kl_P = np.bincount(part_T, _token_kl(value_T), parts) * stands_for_P
        plain_P = own_P & ~truncated_P
        mean_of_age = {0: self.engine} | _means(kl_P, tokens_P, age_P, plain_P & (tokens_P > 0))
        self.engine = mean_of_age[0]
        means = [mean_of_age.get(age) for age in age_P.tolist()]
        expected_P = np.array([np.nan if mean is None else mean for mean in means]) * tokens_P
        known_P = own_P & (plain_P | ~np.isnan(expected_P)) & (tokens_P > 0)
        if self.engine is None or not known_P.any():
            return {}
        plain_kl_P, tokens = np.where(plain_P, kl_P, expected_P), tokens_P[known_P].sum()
        lag = (plain_kl_P - self.engine * tokens_P)[known_P & (age_P > 0)].sum() / tokens
        found = {"lag": lag, "engine": self.engine}
        if (cut_P := known_P & ~plain_P).any():
            # Under a truncated sampler E[ρ] is below 1: of the two estimates of the KL only −log ρ is unbiased.
            surprise_P = np.bincount(part_T, -value_T, parts) * stands_for_P
            found["truncation"] = (surprise_P - plain_kl_P)[cut_P].sum() / tokens
        if left := tokens_P[own_P & ~known_P].sum():
            found["unidentified"] = left / (left + tokens)
        return {f"divergence/by_cause/{cause}": float(value) for cause, value in found.items()}


def _means(
    kl_P: npt.NDArray[np.float64], tokens_P: npt.NDArray[np.float64], age_P: npt.NDArray[np.int64], among_P: Mask
) -> dict[int, float]:
    """The mean KL per token of each age."""
    ages = np.unique(age_P[among_P]).tolist()
    return {
        age: float(kl_P[here_P].sum() / tokens_P[here_P].sum()) for age in ages for here_P in [among_P & (age_P == age)]
    }


def _token_kl(log_ratio_T: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`ρ − 1 − log ρ`, exact also for the tiny differences between an engine and a learner."""
    return np.maximum(np.expm1(np.clip(log_ratio_T, -EXPONENT_LIMIT, EXPONENT_LIMIT)) - log_ratio_T, 0)
