"""Plain values that travel through the rooms: a prompt, a response, its rewards, the group it is compared in.

Every token carries its provenance from birth to gradient: whether the policy answers for it, the log-probability it
was sampled with, and the version of the weights that wrote it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from solera.config import LARGEST_REWARD
from solera.errors import SoleraError
from solera.values import is_token_ids, kind, logp_of, token_ids_of, tokens_written

FinishReason = Literal["stop", "length"]
_FINISH_REASONS = ("stop", "length")
PROBE = "probe"
"""Origin of responses that are looked at and never learned from."""
NO_VERSION = -1
"""Version of a token that no policy wrote: the prompt's, a tool's, the user's."""


T = TypeVar("T")
_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True)
class Prompt:
    """A problem to attempt. Rollouts that share `key` may be compared with each other.

    >>> Prompt(key="arithmetic/2+3", token_ids=(4, 12, 5, 14), data={"answer": "5"}).key
    'arithmetic/2+3'
    """

    key: str
    token_ids: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise SoleraError(f"prompt: its key must be text, not {kind(self.key)}")
        if type(self.data) is not dict and not isinstance(self.data, Mapping):
            raise SoleraError(f"prompt {self.key!r}: its data must be a dictionary, not {kind(self.data)}")
        if not is_token_ids(self.token_ids):
            ids = token_ids_of(self.token_ids, f"prompt {self.key!r}: token_ids")
            object.__setattr__(self, "token_ids", ids)


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy; `top_p` below 1 is for evaluation only.

    >>> Sampling(temperature=1.0, max_tokens=8).truncated
    False
    """

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """A response ends with the token that completes one of these texts, and holds it. The store does not keep them, as
    they say where a response ends, not how its tokens are drawn."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn though the policy gives them probability."""
        return self.top_p < 1.0 or self.temperature == 0.0


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine wrote after a prompt: token ids (the final eos included) and their provenance.

    `behaviour_logp_T` is of the distribution actually sampled from, its temperature applied. `versions` are runs of
    (tokens, version of the weights that wrote them): one run, unless weights changed while it was being written.
    `lineage` names the training run whose weights those were. Every token has one log-probability and one version; a
    completion where the numbers differ is refused when it is made.
    """

    token_ids_T: npt.NDArray[np.int32]
    behaviour_logp_T: npt.NDArray[np.float32]
    versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    lineage: str | None = None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        tokens_T, logp_T = self.token_ids_T, self.behaviour_logp_T
        if getattr(tokens_T, "dtype", None) is not _INT or getattr(logp_T, "dtype", None) is not _FLOAT:
            tokens_T = np.array(token_ids_of(tokens_T, "completion: token_ids_T"), _INT)
            logp_T = logp_of(logp_T)
            object.__setattr__(self, "token_ids_T", tokens_T)
            object.__setattr__(self, "behaviour_logp_T", logp_T)
        written = tokens_written(self.versions)
        if not tokens_T.shape == logp_T.shape == (written,):
            raise SoleraError(
                f"completion: {tokens_T.size} tokens, {logp_T.size} log-probabilities, and versions for {written} "
                "tokens; every token has one of each"
            )
        if not logp_T.dot(logp_T) < math.inf:  # the cheapest look at all of them; NaN compares with nothing
            raise SoleraError("completion: a log-probability is not a finite number")
        if self.finish_reason not in _FINISH_REASONS:
            raise SoleraError(f"completion: finish_reason is {self.finish_reason!r}; it must be stop or length")


class Span(NamedTuple):
    """Tokens `start` to `stop` (excluded) of a sequence, written by one version of the policy."""

    start: int
    stop: int
    version: int


@lru_cache(maxsize=512)
def _given(token_ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """A prompt's tokens, the same for every member of its group."""
    return np.array(token_ids, _INT)


def _made(kind: type[T], **fields: Any) -> T:
    """A frozen value of fields that were checked already: two fifths of its constructor's time, for every rollout."""
    made = object.__new__(kind)
    made.__dict__.update(fields)
    return made


@dataclass(frozen=True, eq=False)
class Sequence:
    """One run of tokens through the model, and the spans of it that the policy answers for.

    Provenance is kept by span, since it rarely changes from one token to the next; `mask_T`, `behaviour_logp_T` and
    `version_T` give it for each token. `span_logp` holds the behaviour log-probabilities of the spans' tokens, one
    after the other, and is `None` where nobody recorded them (another model's text).

    >>> sequence = Sequence.turns(((4, 12, 5), Completion(
    ...     np.array([7, 1], np.int32), np.array([-0.5, -0.25], np.float32), ((2, 3),), "stop")))
    >>> sequence.token_ids_T.tolist(), sequence.spans
    ([4, 12, 5, 7, 1], (Span(start=3, stop=5, version=3),))
    >>> sequence.mask_T.tolist(), sequence.version_T.tolist(), sequence.behaviour_logp_T.tolist()
    ([False, False, False, True, True], [-1, -1, -1, 3, 3], [0.0, 0.0, 0.0, -0.5, -0.25])
    """

    token_ids_T: npt.NDArray[np.int32]
    spans: tuple[Span, ...]
    span_logp: npt.NDArray[np.float32] | None
    length: int = field(init=False)
    """Tokens the policy answers for."""
    version: int = field(init=False)
    """The oldest version that wrote one of them; `NO_VERSION` where none did."""

    def __post_init__(self) -> None:
        if self.token_ids_T.dtype != _INT:
            object.__setattr__(self, "token_ids_T", self.token_ids_T.astype(_INT))
        if self.span_logp is not None and self.span_logp.dtype != _FLOAT:
            object.__setattr__(self, "span_logp", self.span_logp.astype(_FLOAT))
        end, total = 1, 0  # the first token has nothing before it to be predicted from
        oldest = self.spans[0].version if self.spans else NO_VERSION
        for start, stop, version in self.spans:
            if not end <= start < stop:
                raise SoleraError(f"sequence: span {start}–{stop} is empty, out of order, or holds the first token")
            end, total = stop, total + stop - start
            oldest = min(oldest, version)
        if self.spans and end > len(self.token_ids_T):
            raise SoleraError(f"sequence: a span ends at {end}, beyond its {len(self.token_ids_T)} tokens")
        if self.span_logp is not None and len(self.span_logp) != total:
            raise SoleraError(f"sequence: {len(self.span_logp)} log-probabilities for {total} tokens")
        object.__setattr__(self, "length", total)
        object.__setattr__(self, "version", oldest)

    @classmethod
    def turns(cls, parts: "tuple[tuple[int, ...] | Completion, ...]") -> "Sequence":
        """Text given (token ids) and text written (completions) in the order they were seen by the model."""
        if len(parts) == 2 and (usual := cls._answer(*parts)) is not None:
            return usual
        tokens, logps, spans, end = [], [], [], 0
        for number, part in enumerate(parts):
            if isinstance(part, Completion):
                tokens.append(part.token_ids_T)
                logps.append(part.behaviour_logp_T)
                for count, version in part.versions:
                    if count:
                        spans.append(Span(end, end + count, version))
                    end += count
            else:
                ids = token_ids_of(part, f"sequence: turn {number}" if number else "sequence: the prompt")
                tokens.append(_given(ids))
                end += len(ids)
        span_logp = np.concatenate([np.zeros(0, np.float32), *logps]) if len(logps) != 1 else logps[0]
        return cls(np.concatenate(tokens), tuple(spans), span_logp)

    @classmethod
    def _answer(
        cls, given: "tuple[int, ...] | Completion", written: "tuple[int, ...] | Completion"
    ) -> "Sequence | None":
        """A prompt and what one version wrote after it; `None` for anything else."""
        if type(given) is not tuple or not isinstance(written, Completion) or len(written.versions) != 1:
            return None
        start, ((count, version),) = len(given), written.versions
        if start == 0 or count == 0:
            return None
        return _made(
            cls, token_ids_T=np.concatenate((_given(given), written.token_ids_T)), span_logp=written.behaviour_logp_T,
            spans=(Span(start, start + count, version),), length=count, version=version,
        )  # fmt: skip

    @property
    def mask_T(self) -> npt.NDArray[np.bool_]:
        """True on the tokens the policy answers for."""
        return self._spread(np.zeros(len(self.token_ids_T), np.bool_), [True] * len(self.spans))

    @property
    def version_T(self) -> npt.NDArray[np.int32]:
        """Version that wrote each token; `NO_VERSION` where none did."""
        empty = np.full(len(self.token_ids_T), NO_VERSION, np.int32)
        return self._spread(empty, [span.version for span in self.spans])

    @property
    def behaviour_logp_T(self) -> npt.NDArray[np.float32] | None:
        """Log-probability each token was sampled with, 0 outside the spans; `None` where nobody recorded it."""
        if self.span_logp is None:
            return None
        values = np.zeros(len(self.token_ids_T), np.float32)
        values[self.mask_T] = self.span_logp
        return values

    def _spread(self, array: npt.NDArray[Any], values: list[Any]) -> npt.NDArray[Any]:
        for (start, stop, _), value in zip(self.spans, values, strict=True):
            array[start:stop] = value
        return array


REWARD_RULE = f"a reward must be finite, and at most {LARGEST_REWARD:g} in size"


@dataclass(frozen=True)
class Reward:
    """One grade of one rollout. A rollout's reward is the sum over parts of each part's latest revision.

    `position` is the token, counted from the response's first, that it was given for; `None`: for the whole of it.

    >>> Reward(1.0, part="correct", source="grader").value
    1.0
    """

    value: float
    part: str = "reward"
    source: str = "task"
    revision: int = 0
    position: int | None = None

    def __post_init__(self) -> None:
        if type(self.value) is not float:  # a store would keep the bytes of another library's number
            object.__setattr__(self, "value", float(self.value))
        if not abs(self.value) <= LARGEST_REWARD:
            raise SoleraError(f"reward {self.part!r} from {self.source!r} is {self.value}; {REWARD_RULE}")


def _rewards_of(rewards: Any, key: str) -> tuple[Reward, ...]:
    """A rollout's rewards as a tuple; what is no `Reward` is refused."""
    if not isinstance(rewards, tuple | list):
        raise SoleraError(f"rollout of {key!r}: rewards must be a tuple, such as (Reward(1.0),), not {kind(rewards)}")
    for reward in rewards:
        if not isinstance(reward, Reward):
            raise SoleraError(
                f"rollout of {key!r}: rewards holds {reward!r}; each must be a solera.Reward, such as Reward(1.0)"
            )
    return tuple(rewards)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One attempt at a prompt: an episode of one or more sequences, its rewards, its origin.

    `lineage` names the training run whose weights wrote it, `None` for foreign text; `id` is given by the store; `text`
    is the response as its author wrote it, where the tokens do not spell it. `admission` is the position in the task's
    stream at which the run attempted the prompt: rollouts of one admission were generated together. `None`: imported.

    >>> completion = Completion(np.array([7, 1], np.int32), np.zeros(2, np.float32), ((2, 3),), "stop", lineage="a1b2")
    >>> rollout = Rollout.of(Prompt("arithmetic/2+3", (4, 12, 5)), completion, rewards=(Reward(1.0),))
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
    text: str | None = None
    admission: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", _rewards_of(self.rewards, self.prompt_key))

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        *turns: tuple[int, ...] | Completion,
        rewards: tuple[Reward, ...] = (),
        origin: str = "self",
    ) -> "Rollout":
        """An episode in one sequence: what was written after the prompt, and between it what was given (token ids).

        Lineage, sampling and finish reason are those of the last completion.
        """
        if not isinstance(prompt, Prompt):
            raise SoleraError(f"rollout: the first argument must be a solera.Prompt, not {kind(prompt)}")
        try:
            sequence = Sequence.turns((prompt.token_ids, *turns))
        except SoleraError as error:
            raise SoleraError(f"rollout of {prompt.key!r}: {error}") from None
        rewards = _rewards_of(rewards, prompt.key)
        for last in reversed(turns):
            if isinstance(last, Completion):
                return _made(
                    cls, prompt_key=prompt.key, sequences=(sequence,), rewards=rewards, lineage=last.lineage,
                    origin=origin, finish_reason=last.finish_reason, sampling=last.sampling, id=None, text=None,
                    admission=None,
                )  # fmt: skip
        raise SoleraError(f"rollout of {prompt.key!r}: nothing in it was written by an engine")

    def numbered(self, id_: int) -> "Rollout":
        """The same attempt under the number that a store gave it."""
        return self._with(id=id_)

    def admitted(self, admission: int) -> "Rollout":
        """The same attempt with its position in the task's stream."""
        return self._with(admission=admission)

    def _with(self, **fields: Any) -> "Rollout":
        same = object.__new__(Rollout)  # a fifth of the time that giving every field takes, for every rollout drawn
        same.__dict__.update(self.__dict__, **fields)
        return same

    @property
    def length(self) -> int:
        """Tokens the policy answers for, over all sequences."""
        if len(self.sequences) == 1:
            return self.sequences[0].length
        return sum(sequence.length for sequence in self.sequences)

    @property
    def reward(self) -> float | None:
        """Sum over parts of the latest revision; `None` while no reward has come."""
        if not self.rewards:
            return None
        if len(self.rewards) == 1:
            return self.rewards[0].value
        return math.fsum(self.parts.values())

    @property
    def revision(self) -> int | None:
        """The highest revision among its rewards: 0 while none was revised."""
        if len(self.rewards) == 1:
            return self.rewards[0].revision
        return max((reward.revision for reward in self.rewards), default=None)

    @property
    def parts(self) -> dict[str, float]:
        """The latest revision of each part of its reward."""
        latest: dict[str, Reward] = {}
        for reward in self.rewards:
            held = latest.get(reward.part)
            if held is None or reward.revision >= held.revision:
                latest[reward.part] = reward
        return {part: reward.value for part, reward in latest.items()}

    @property
    def known(self) -> bool:
        """Whether its author's log-probabilities were recorded."""
        if len(self.sequences) == 1:
            return self.sequences[0].span_logp is not None
        return all(sequence.span_logp is not None for sequence in self.sequences)

    @property
    def version(self) -> int | None:
        """The oldest version that wrote one of its tokens; `None` for foreign text or an empty response."""
        if len(self.sequences) == 1:
            version = self.sequences[0].version
        else:
            version = min((sequence.version for sequence in self.sequences if sequence.spans), default=NO_VERSION)
        return version if version != NO_VERSION else None

    def age(self, now: int, lineage: str) -> int | None:
        """Batches learned from since it was written; `None` for text of another lineage."""
        version = self.version
        return now - version if version is not None and self.lineage == lineage else None


def age_band(age: int) -> str:
    """Ages in octaves, so that there are few names however old data becomes.

    >>> [age_band(age) for age in (0, 1, 2, 3, 4, 9)]
    ['0', '1', '2-3', '2-3', '4-7', '8-15']
    """
    lowest = 1 << max(age, 1).bit_length() - 1
    return str(age) if age < 2 else f"{lowest}-{2 * lowest - 1}"


@dataclass(frozen=True, eq=False)
class Group:
    """Rollouts of one prompt key that are compared with each other. Formed when drawn, never split between updates."""

    prompt_key: str
    rollouts: tuple[Rollout, ...]


class Use(NamedTuple):
    """That a rollout was learned from: at which version, how old it was, and with which advantage.

    `advantage` is `None` where the rollout took no part: its reward was missing, its response empty, or its group
    had zero variance. `revision` is that of the reward behind it (`Rollout.revision`). `group` numbers the groups of
    one step in the order drawn; the store that formed them fills it in.
    """

    rollout_id: int
    version: int
    age: int | None
    advantage: float | None
    revision: int | None = None
    group: int | None = None


class TensorSpec(NamedTuple):
    """Name, shape and dtype of one weight tensor, and a digest of its values (`models/digest.py`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: int


class PolicyVersion(NamedTuple):
    """Which weights: those of a training run after so many batches."""

    lineage: str
    version: int


@dataclass(frozen=True)
class Manifest:
    """Which weights these are, and every tensor that belongs to them."""

    lineage: str
    version: int
    tensors: tuple[TensorSpec, ...]
