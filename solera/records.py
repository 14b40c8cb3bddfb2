"""Plain values that travel through the rooms: from a prompt to a response, its rewards, and the group it is compared in.

Every token carries its provenance from birth to gradient: whether the policy answers for it, the log-probability it
was sampled with, and the version of the weights that wrote it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from solera.errors import SoleraError

FinishReason = Literal["stop", "length"]
NO_VERSION = -1
"""Version of a token that no policy wrote: the prompt's, a tool's, the user's."""


@dataclass(frozen=True)
class Prompt:
    """A problem to attempt. Rollouts that share `key` may be compared with each other.

    >>> Prompt(key="arithmetic/2+3", token_ids=(4, 12, 5, 14), data={"answer": "5"}).key
    'arithmetic/2+3'
    """

    key: str
    token_ids: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy; `top_p` below 1 is for evaluation only.

    >>> Sampling(temperature=1.0, max_tokens=8).truncated
    False
    """

    temperature: float
    max_tokens: int
    top_p: float = 1.0

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn though the policy gives them probability."""
        return self.top_p < 1.0 or self.temperature == 0.0


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine wrote after a prompt: token ids (the final eos included) and their provenance.

    `behaviour_logp_T` is of the distribution actually sampled from, its temperature applied.
    """

    token_ids_T: npt.NDArray[np.int32]
    behaviour_logp_T: npt.NDArray[np.float32]
    version_T: npt.NDArray[np.int32]
    finish_reason: FinishReason


@dataclass(frozen=True, eq=False)
class Sequence:
    """One run of tokens through the model. `mask_T` is true on the tokens the policy answers for.

    `behaviour_logp_T` is 0 where the mask is false, and `None` where nobody recorded it (another model's text);
    `version_T` is `NO_VERSION` where the mask is false, and `None` for foreign text.

    >>> sequence = Sequence.of(prompt=(4, 12, 5), completion=Completion(
    ...     np.array([7, 1], np.int32), np.array([-0.1, -0.2], np.float32), np.array([3, 3], np.int32), "stop"))
    >>> sequence.token_ids_T.tolist(), sequence.mask_T.tolist(), sequence.version_T.tolist()
    ([4, 12, 5, 7, 1], [False, False, False, True, True], [-1, -1, -1, 3, 3])
    """

    token_ids_T: npt.NDArray[np.int32]
    mask_T: npt.NDArray[np.bool_]
    behaviour_logp_T: npt.NDArray[np.float32] | None
    version_T: npt.NDArray[np.int32] | None

    def __post_init__(self) -> None:
        length = len(self.token_ids_T)
        for name in ("mask_T", "behaviour_logp_T", "version_T"):
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise SoleraError(f"sequence: {name} has {len(array)} entries for {length} tokens")
        if length and self.mask_T[0]:
            raise SoleraError("sequence: the first token has nothing before it to be predicted from; mask it out")

    @classmethod
    def of(cls, prompt: tuple[int, ...], completion: Completion) -> "Sequence":
        """The single-turn case: a prompt, and one completion that the policy answers for."""
        return cls.turns((prompt, completion))

    @classmethod
    def turns(cls, parts: "tuple[tuple[int, ...] | Completion, ...]") -> "Sequence":
        """Text given (token ids) and text written (completions) in the order they were seen by the model."""
        tokens, masks, logps, versions = [], [], [], []
        for part in parts:
            written = isinstance(part, Completion)
            length = len(part.token_ids_T) if isinstance(part, Completion) else len(part)
            tokens.append(part.token_ids_T if isinstance(part, Completion) else np.array(part, np.int32))
            masks.append(np.full(length, written))
            logps.append(part.behaviour_logp_T if isinstance(part, Completion) else np.zeros(length, np.float32))
            versions.append(part.version_T if isinstance(part, Completion) else np.full(length, NO_VERSION, np.int32))
        return cls(np.concatenate(tokens), np.concatenate(masks), np.concatenate(logps), np.concatenate(versions))

    @cached_property
    def length(self) -> int:
        """Tokens the policy answers for."""
        return int(np.count_nonzero(self.mask_T))


@dataclass(frozen=True)
class Reward:
    """One grade of one rollout. A rollout's reward is the sum over parts of each part's latest revision.

    >>> Reward(1.0, part="correct", source="grader").value
    1.0
    """

    value: float
    part: str = "reward"
    source: str = "task"
    revision: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise SoleraError(f"reward {self.part!r} from {self.source!r} is {self.value}; a reward must be finite")


@dataclass(frozen=True, eq=False)
class Rollout:
    """One attempt at a prompt: an episode of one or more sequences, its rewards, its origin.

    `lineage` names the training run whose weights wrote it, `None` for foreign text; `id` is given by the store.

    >>> rollout = Rollout("arithmetic/2+3", (Sequence.of((4, 12, 5), Completion(
    ...     np.array([7, 1], np.int32), np.zeros(2, np.float32), np.array([3, 3], np.int32), "stop")),),
    ...     rewards=(Reward(1.0),), lineage="a1b2")
    >>> rollout.length, rollout.reward, rollout.age(now=5, lineage="a1b2"), rollout.age(now=5, lineage="another")
    (2, 1.0, 2, None)
    """

    prompt_key: str
    sequences: tuple[Sequence, ...]
    rewards: tuple[Reward, ...] = ()
    lineage: str | None = None
    origin: str = "self"
    finish_reason: FinishReason = "stop"
    sampling: Sampling | None = None
    id: int | None = None

    @property
    def length(self) -> int:
        """Tokens the policy answers for, over all sequences."""
        return sum(sequence.length for sequence in self.sequences)

    @property
    def reward(self) -> float | None:
        """Sum over parts of the latest revision; `None` while no reward has come."""
        if not self.rewards:
            return None
        latest: dict[str, Reward] = {}
        for reward in self.rewards:
            held = latest.get(reward.part)
            if held is None or reward.revision >= held.revision:
                latest[reward.part] = reward
        return math.fsum(reward.value for reward in latest.values())

    @property
    def version(self) -> int | None:
        """The oldest version that wrote one of its tokens; `None` for foreign text or an empty response."""
        written = [s.version_T[s.mask_T] for s in self.sequences if s.version_T is not None and s.length]
        return min((int(versions.min()) for versions in written), default=None)

    def age(self, now: int, lineage: str) -> int | None:
        """Batches learned from since it was written; `None` for text of another lineage."""
        version = self.version
        return now - version if version is not None and self.lineage == lineage else None


@dataclass(frozen=True, eq=False)
class Group:
    """Rollouts of one prompt key that are compared with each other. Formed when drawn, never split between updates."""

    prompt_key: str
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class Use:
    """That a rollout was learned from: at which version, how old it was, and with which advantage.

    `advantage` is `None` where the rollout took no part: its reward was missing, its response empty, or its group
    had zero variance.
    """

    rollout_id: int
    version: int
    age: int | None
    advantage: float | None


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one weight tensor, as sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Which weights these are, and every tensor that belongs to them."""

    lineage: str
    version: int
    tensors: tuple[TensorSpec, ...]
