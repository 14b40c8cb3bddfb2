"""Engine error, separate from staleness: log ρ = (log π_θ − log π_a) + (log π_a − b). (docs/formulas.md, section 8)"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch


class Mismatch:
    """Measures how much engine and learner disagree with the same weights. Warns once if the difference is large.

    On responses of age 0 the policy is π_a itself, so all of `log π − b` is the engine's error.
    """

    def __init__(self, tolerance: float, say: Callable[[str], None]) -> None:
        self.tolerance = tolerance
        self.say = say
        self._warned = False

    def measure(
        self, log_ratio_T: npt.NDArray[np.floating], response_T: npt.NDArray[np.int64], fresh_B: npt.NDArray[np.bool_]
    ) -> dict[str, float]:
        """`mismatch/logp`: mean of |log π_a − b| over the tokens of responses of age 0, where there are any."""
        error_T = np.abs(log_ratio_T if fresh_B.all() else log_ratio_T[fresh_B[response_T]])
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
