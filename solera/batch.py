"""What the loop and the learner give each other: plain values and numpy arrays, which can travel between processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solera.records import NO_VERSION, Rollout, Use

FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Batch:
    """The responses that take part in a step (`_B`), group by group.

    `metrics` and `uses` describe every rollout that was drawn for it, masked groups included. A rollout without a use
    would be drawn again.
    """

    rollouts: tuple[Rollout, ...]
    advantage_B: npt.NDArray[np.float64]
    reward_B: npt.NDArray[np.float64]
    group_B: npt.NDArray[np.int64]
    """Number of each response's group, 0 … `groups` − 1, in ascending order."""
    groups: int
    metrics: dict[str, float]
    uses: list[Use]
    watched: tuple[Rollout, ...] = ()
    """Responses of a few masked groups. They are scored for the divergences, but not learned from."""
    turn_advantages: tuple[npt.NDArray[np.float64], ...] | None = None
    """The advantage of each token of each response, in the order written, if turns have their own
    (`objective.credit`)."""
    watched_for: float = 0.0
    """How many masked responses each of them stands for."""

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """Every response that an update scores."""
        return self.rollouts + self.watched

    @property
    def stands_for_B(self) -> npt.NDArray[np.float32]:
        """How many responses each scored one stands for: 1 if it is trained on, more if it is watched."""
        return np.repeat(np.array([1, self.watched_for], np.float32), [len(self.rollouts), len(self.watched)])


@dataclass(frozen=True, eq=False)
class Parts:
    """Responses (`_B`) divided by the version that wrote each token into parts (`_P`). A response of one version is one
    part, so without others the parts are the responses.

    `response_P` is the number of each part's response, in ascending order. `version_P` is the version that wrote the
    part; `NO_VERSION` for text from elsewhere.
    """

    rollouts: Sequence[Rollout]
    response_P: npt.NDArray[np.int64]
    version_P: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "Parts":
        versions = [np.unique(r.version_T).tolist() if r.mixed else [_or_none(r.version)] for r in rollouts]
        response_P = np.repeat(np.arange(len(versions)), list(map(len, versions)))
        return cls(rollouts, response_P, np.array([v for several in versions for v in several], np.int64))

    @property
    def divided(self) -> bool:
        """Whether a response has several parts."""
        return len(self.response_P) > len(self.rollouts)

    def age(self, part: int, now: int, lineage: str) -> int | None:
        """Batches trained on since the part was written; `None` for text of another lineage."""
        version = int(self.version_P[part])
        own = version != NO_VERSION and self.rollouts[self.response_P[part]].lineage == lineage
        return now - version if own else None

    def number_T(self, response_T: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The part of each token. The tokens of a response are all there, in the order in which they were written."""
        if not self.divided:
            return response_T
        first_B = np.searchsorted(self.response_P, np.arange(len(self.rollouts)))
        within = [
            np.unique(self.rollouts[b].version_T, return_inverse=True)[1] + first_B[b]
            for b in np.unique(response_T).tolist()
        ]
        part_T = np.empty_like(response_T)
        part_T[np.argsort(response_T, kind="stable")] = np.concatenate([np.zeros(0, np.int64), *within])
        return part_T


def _or_none(version: int | None) -> int:
    return NO_VERSION if version is None else version


@dataclass(frozen=True, eq=False)
class Update:
    """What an update did, and how far the policy was from the authors of the batch before its first step.

    `log_ratio_T` is `log π_k − log α` of every scored token whose `log α` is known. `response_T` is the number of the
    token's response in `Batch.scored`. The tokens of a response are in the order in which they were written; the
    responses are in any order.
    """

    metrics: dict[str, float]
    log_ratio_T: FloatArray
    response_T: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Scored:
    """Log-probabilities of the tokens of some rollouts: rollout by rollout, each in the order it was written.

    The order does not depend on how the rollouts were cut into micro-batches, so that two scorings of the same
    rollouts can be subtracted token by token. `behaviour_logp_T` is NaN where nobody recorded it.
    """

    logp_T: FloatArray
    behaviour_logp_T: npt.NDArray[np.float32]
    response_T: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], logp_T: FloatArray) -> "Scored":
        """`logp_T` with what the rollouts themselves say about the same tokens."""
        sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
        unknown = np.float32(np.nan)
        behaviour = [np.full(s.length, unknown) if s.span_logp is None else s.span_logp for s in sequences]
        lengths = [rollout.length for rollout in rollouts]
        assert logp_T.shape == (sum(lengths),), "one log-probability for each token"
        behaviour_logp_T = np.concatenate([np.zeros(0, np.float32), *behaviour])
        return cls(logp_T, behaviour_logp_T, np.repeat(np.arange(len(lengths)), lengths))
