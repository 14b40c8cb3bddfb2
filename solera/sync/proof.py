"""Prove that weights arrived: compare what the engine holds, and what it generates, with what was sent."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solera.errors import SoleraError
from solera.records import Manifest, TensorSpec

TOLERANCE = {"torch.bfloat16": 0.2, "torch.float16": 0.05}
"""Largest mean difference of log-probabilities, at temperature 1, that each number format of the engine may cause."""
TOLERANCE_ELSE = 1e-3
MOVED = 0.1
"""If the policy moved by more than this share of the tolerance and the engine did not, the engine is at fault. Smaller
steps may be lost to rounding."""


class SyncFaultError(SoleraError):
    """Weights did not arrive, arrived damaged, or are not the ones that the engine generates with."""


def difference(sent: Manifest, held: Manifest, before: Manifest | None) -> str | None:
    """Describe how the engine's weights differ from what was sent. `before` is what was sent the time before."""
    if held == before or not held.tensors:
        return f"nothing arrived, the engine still holds version {held.version}"
    if held.lineage != sent.lineage:
        return f"the engine holds weights of another run ({held.lineage}, sent {sent.lineage})"
    if held.version != sent.version:
        order = "an older" if held.version < sent.version else "a later"
        return f"{order} version arrived, the engine holds version {held.version}"
    return _tensors_differ(sent, held, before)


def _tensors_differ(sent: Manifest, held: Manifest, before: Manifest | None) -> str | None:
    arrived = {spec.name: spec for spec in held.tensors}
    if missing := [spec.name for spec in sent.tensors if spec.name not in arrived]:
        return f"tensor {_and_more(missing)} did not arrive"
    if extra := sorted(arrived.keys() - {spec.name for spec in sent.tensors}):
        return f"the engine holds a tensor that was not sent: {_and_more(extra)}"
    wrong = [spec for spec in sent.tensors if arrived[spec.name] != spec]
    if before is not None and wrong and held.tensors == before.tensors:
        return f"version {held.version} is stamped but not applied: all tensors are those of version {before.version}"
    if wrong:
        return f"tensor {_and_more([s.name for s in wrong])} {_damage(wrong[0], arrived, sent, before)}"
    return None


def _and_more(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _damage(spec: TensorSpec, arrived: dict[str, TensorSpec], sent: Manifest, before: Manifest | None) -> str:
    """Describe what is wrong with a tensor, in words that fit after its name."""
    held = arrived[spec.name]
    if (held.shape, held.dtype) != (spec.shape, spec.dtype):
        return f"arrived as {held.dtype} {list(held.shape)}, sent as {spec.dtype} {list(spec.shape)}"
    if before is not None and held in before.tensors:
        return f"is stale: it still has its values of version {before.version}"
    for other in sent.tensors:
        if other.digest == held.digest:
            return f"is swapped: it arrived with the values of {other.name}"
    return "arrived with other values than were sent: damaged, or rounded through another type"


@dataclass(frozen=True, eq=False)
class Canary:
    """What the engine generated after fixed prompts with fixed seeds, with both sides' log-probabilities."""

    token_ids: tuple[tuple[int, ...], ...]
    authors: frozenset[tuple[str | None, int]]
    """Lineage and version that the engine stamped on it."""
    engine_logp_T: npt.NDArray[np.float32]
    learner_logp_T: npt.NDArray[np.float32]

    @property
    def difference(self) -> float:
        """Mean difference between the two sides."""
        return float(np.abs(self.engine_logp_T - self.learner_logp_T).mean())

    def repeats(self, before: "Canary") -> bool:
        """Whether the engine generated exactly the same, bit for bit."""
        return self.token_ids == before.token_ids and np.array_equal(self.engine_logp_T, before.engine_logp_T)

    def fault(self, sent: Manifest, before: "Canary | None", tolerance: float) -> str | None:
        """Return why this cannot have been generated with the weights that were sent, if so."""
        if strangers := self.authors - {(sent.lineage, sent.version)}:
            lineage, version = min(strangers, key=str)
            return f"stamped with version {version} of {'this' if lineage == sent.lineage else 'another'} run"
        if not self.difference <= tolerance:  # NaN is a fault
            return f"log-probabilities differ from the learner's by {self.difference:.2g} on average"
        if before is not None and self.repeats(before):
            moved = float(np.abs(self.learner_logp_T - before.learner_logp_T).max())
            if moved > MOVED * tolerance:
                return f"log-probabilities did not change by one bit while the learner's moved by {moved:.2g}"
        return None


def tolerance(dtype: str, temperature: float) -> float:
    """Largest allowed mean difference between engine and learner. A low temperature multiplies every error of the
    logits."""
    return TOLERANCE.get(dtype, TOLERANCE_ELSE) / min(1.0, temperature)
