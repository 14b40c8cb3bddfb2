"""The interfaces between packages. Whatever fits one of these can take its place: the loop knows nothing else of it."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from solera.batch import Batch, Scored, Update
from solera.config import InFlight
from solera.errors import SoleraError
from solera.records import (
    Completion,
    Group,
    Manifest,
    PolicyVersion,
    Prompt,
    Reward,
    Rollout,
    Sampling,
    TensorSpec,
    Use,
)

Metrics = Mapping[str, float]
"""Names have the form `package/quantity`."""


class Codec(Protocol):
    """Converts text to token ids and back."""

    unknown_id: int | None
    """The token for text that the vocabulary cannot spell; `None` if it can spell everything."""

    chats: bool
    """Whether the model has a chat template."""

    end_token_ids: tuple[int, ...]
    """Tokens that end a response."""

    max_length: int | None
    """Maximum number of tokens that the model reads, prompt and responses together; `None` means no limit."""

    def encode(self, text: str) -> tuple[int, ...]: ...

    def encode_each(self, texts: Sequence[str], whole: bool) -> list[tuple[int, ...]]:
        """Encode many texts faster than one by one: with what `encode` adds at their start or end (`whole`), or without
        it."""
        ...

    def response(self, text: str, ended: bool) -> tuple[int, ...]:
        """Encode a response, with the end token if `ended`."""
        ...

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
    ) -> tuple[int, ...]:
        """Apply the model's chat template, up to the start of its next message. `tools` are JSON schemas;
        `template_kwargs` are arguments of the template, such as `enable_thinking=False`."""
        ...

    def chat_text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
    ) -> str:
        """The text that `chat` encodes."""
        ...

    def encode_after(self, given: tuple[int, ...], text: str) -> tuple[int, ...]:
        """The tokens of a text that continues `given`. Nothing is added at its start or end."""
        ...

    def text_after(self, given: tuple[int, ...], written: tuple[int, ...]) -> str:
        """The text that `written` adds after `given`, its end token included."""
        ...

    def decode(self, token_ids_T: npt.NDArray[np.int32]) -> str:
        """The text without its final end token. Other special tokens stay visible; otherwise they could slip past a
        grader."""
        ...


class Generate(Protocol):
    """The function that a task calls to let the policy write. It takes the whole text so far and returns the
    continuation. Call it once per turn.

    - `max_tokens`: most tokens of this turn, in place of `sampling.max_tokens`. Where the text leaves less room in the
      model's context, the completion ends there with `finish_reason = "length"`. Where it leaves none, the completion
      is empty. The episode should end then.
    - `stop`: a text, or several. The completion ends with the token that completes one of them, and holds it;
      `finish_reason` is `"stop"`.
    - `temperature`: for this turn, in place of the run's. `behaviour_logp` is then of the distribution that was sampled
      from, at this temperature; the learner's `logp`, `proximal_logp` and `ref_logp` stay at the run's temperature. So
      importance weights against `behaviour_logp` stay correct. An objective that does not use it takes these tokens for
      its own policy's, and `mismatch/logp` and the divergences count the difference. 0 has no such weights: unless the
      run itself is greedy, as an evaluation may be, the tokens of this turn are not trained on (`Completion.trained`).
    - `room`: most tokens that are left for this turn. It can only lower the limit.
    """

    async def __call__(
        self,
        token_ids: tuple[int, ...],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        temperature: float | None = None,
        room: int | None = None,
    ) -> Completion: ...


class Task(Protocol):
    """Supplies problems and grades responses. `run` is one episode, with one turn or many, with or without tools."""

    def prompt(self, index: int) -> Prompt:
        """Problem `index` of the endless training stream. Every call with the same index returns the same problem."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """Up to `count` held-out problems. The training stream never contains them."""
        ...

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        """Run one attempt. The rollout contains the rewards that are known; others can be added to the store later.

        The rollout must contain the inputs and results of `generate`, token for token. It may leave out completions,
        but not change them.
        """
        ...


class Gathered(NamedTuple):
    """Some tensors of weights that other processes have."""

    tensors: dict[str, Any]
    """A copy in this process."""
    specs: tuple[TensorSpec, ...]
    """Described where they were gathered."""


class Courier(Protocol):
    """Another process that has weights, and can send them to engines."""

    def gather(self) -> Iterator[Gathered]:
        """The weights, some tensors at a time. Each time, `send` sends these tensors."""
        ...

    def send(self, receivers: Sequence[Any]) -> list[SoleraError | None]:
        """Returns what was wrong with each of these engines. An error that is raised is the courier's own."""
        ...


@dataclass(frozen=True)
class Weights:
    """Versioned weights in transit: their lineage, their version, and their tensors one by one. They carry no digests,
    so a receiver can report the digests only after reading the values."""

    lineage: str
    version: int
    tensors: Iterator[tuple[str, Any]]
    lent: bool = True
    """Whether somebody may change the tensors later."""
    courier: Courier | None = None
    """Gathers the same tensors. Take them from here or there."""


@dataclass(frozen=True)
class Work:
    """What an engine has done since it was made. The difference of two is what it did in between.

    >>> Work(seconds=3.0, tokens=90) - Work(seconds=1.0, tokens=30)
    Work(seconds=2.0, prefilling=0.0, prefilled=0, tokens=60, digesting=0.0)
    """

    seconds: float = 0.0
    """Seconds in which it computed prompts or decoded."""
    prefilling: float = 0.0
    """Of these, seconds in which it began with new prompts. A GPU goes on computing them afterwards."""
    prefilled: int = 0
    """Prompt tokens computed. A prompt that several responses share counts once."""
    tokens: int = 0
    """Tokens of finished responses."""
    digesting: float = 0.0
    """Seconds in which it took the digests of weights that it was given."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*map(operator.sub, vars(self).values(), vars(other).values()))


class Writer(Protocol):
    """Continues texts."""

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Continue one text. The same weights and seed give the same tokens, regardless of other requests.

        A text that the model cannot read is refused with `BadRequestError`; other requests are not affected.
        """
        ...


class Engine(Writer, Protocol):
    """Generates responses with its own copy of the weights."""

    dtype: str
    """Type in which it holds its weights, as torch spells it. Tensors are cast to it before they are sent."""

    @property
    def slots(self) -> int:
        """How many responses it writes at the same time."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that it generates with."""
        ...

    @property
    def work(self) -> Work:
        """What it has done so far."""
        ...

    @property
    def sampled(self) -> int:
        """Tokens that it has sampled since it was made, including those of responses that were cancelled or are still
        being written. Never falls."""
        ...

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        """Load new weights. Returns a manifest of what it now holds, with digests computed from its own memory after
        loading. `in_flight` is what happens to responses that are being written (`sync.in_flight`)."""
        ...

    def weights(self) -> Weights:
        """The weights it holds, so that they can be loaded again when a run is resumed."""
        ...

    def close(self) -> None:
        """Free what it holds outside this process."""
        ...


@runtime_checkable
class Pooled(Protocol):
    """What an engine has in addition if it consists of several."""

    def prove(self, check: Callable[[Writer], str | None]) -> None:
        """Check each of them after `load`. One for which `check` returns a fault is set aside. If all have one, it is
        raised."""
        ...

    def take_metrics(self) -> Metrics:
        """What each of them did since the last call."""
        ...


class Learner(Protocol):
    """Who trains the policy, in one process or several."""

    lineage: str
    """Name of the training run. Versions of two lineages cannot be compared."""

    version: int
    """Batches learned from."""

    compute: str
    """Type that its forward passes compute in, such as `float32`. A resumed run takes the same."""

    def update(self, batch: Batch) -> Update:
        """Learn from a batch and advance the version. If nothing is left in the batch, only advance the version."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Score responses, none of them empty, under the current policy, at the run's temperature."""
        ...

    def weights(self, dtype: str) -> Weights:
        """The current weights, cast to `dtype`, for an engine to load."""
        ...

    def manifest(self, dtype: str, shared: bool = False) -> Manifest:
        """What `weights(dtype)` are, to compare with what an engine says it holds.

        With `shared`, the engine has the learner's memory: digests are then of where each tensor is.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights, such as the state of the optimiser: nested dicts of tensors."""
        ...

    def restore(self, lineage: str, version: int, state: dict[str, Any] | Path) -> None:
        """Continue from a checkpoint's `state`, or from the folder in which ranks wrote it. The checkpoint's weights
        are loaded already."""
        ...

    def close(self) -> None:
        """End what it runs outside this process."""
        ...


class SupplyState(NamedTuple):
    """Where a supply is in the task's stream, for a checkpoint."""

    position: int
    """The next problem."""
    running: tuple[int, ...] = ()
    """Earlier problems whose groups are not in the store yet. A resumed run attempts them again."""
    ready: tuple[int, ...] = ()
    """Problems whose groups are in the store and have not been drawn."""


class Supply(Protocol):
    """Keeps the store supplied with groups to draw."""

    def wait(self, groups: int, now: PolicyVersion) -> int:
        """Return once the learner, at version `now`, can draw that many groups; returns how many tokens were generated.

        Fewer can be drawn if responses stay without a reward. The next call then writes what is missing.
        """
        ...

    def drawn(self, groups: Sequence[Group], ahead: int) -> None:
        """The batch is drawn. While it is learned from, up to `ahead` groups of the next one may be written.

        A supply in lock-step needs the engine and the task for itself then, until the next `wait`.
        """
        ...

    def take_metrics(self) -> Metrics:
        """What happened since the last call."""
        ...

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, and everything that was written is in the store."""
        ...

    def state(self) -> SupplyState:
        """For a checkpoint. Everything that is complete is in the store afterwards."""
        ...

    def restore(self, state: SupplyState) -> None: ...

    def close(self) -> None: ...


class Tally(NamedTuple):
    """Tokens of rollouts that the run's engine wrote for training (`Store.tally`)."""

    stored: int
    """Newly stored."""
    trained: int
    """Newly used, and in the loss."""
    masked: int
    """Newly used, but not in the loss."""
    waiting: int
    """Not used, and can still be drawn."""
    leftover: int
    """Not used, and passed over: a later problem was used, and earlier ones are not drawn any more."""
    too_old: int
    """Not used, and older than `draw.max_age`."""
    reached: int
    """The last problem of the stream that was used."""


class Store(Protocol):
    """Holds everything that was generated, and supplies everything that is trained on."""

    selective: bool
    """Whether a draw may skip rollouts that have their rewards."""

    def add(self, rollouts: list[Rollout]) -> list[int]:
        """Write rollouts and their rewards, all or none, at the latest at the next `flush`. Returns the ids that `draw`
        and `record` use for them."""
        ...

    def add_at_once(self, rollouts: list[Rollout]) -> list[int]:
        """Write rollouts before returning. Their ids are final."""
        ...

    def add_reward(self, rollout_id: int, reward: Reward) -> None:
        """Add a reward that arrived later. A higher revision of the same part replaces the earlier one. Refuses
        rollouts that training never uses: those of a probe, and those that a resume superseded."""
        ...

    def missing(self, groups: int, group_size: int, reserve: int, now: PolicyVersion) -> int:
        """Number of groups to generate before `groups` can be drawn with `reserve` left over; 0 if there are enough."""
        ...

    def draw(self, groups: int, group_size: int, now: PolicyVersion) -> list[Group]:
        """Up to `groups` groups of rewarded rollouts, chosen by the store's policy, without probes. `now` is the
        learner's version: ages are counted up to it."""
        ...

    def fetch(self, ids: list[int]) -> list[Rollout]:
        """The rollouts with these ids that have rewards, in the order of the ids."""
        ...

    def passed_over(self) -> Mapping[str, int]:
        """Number of rollouts that the last draw could not use, by reason."""
        ...

    def watermark(self) -> int:
        """The id of the last rollout; 0 if there is none."""
        ...

    def uses_before(self, version: int) -> tuple[int, int]:
        """The number of recorded uses of earlier versions, and the sum of their rollouts' ids."""
        ...

    def record(self, uses: list[Use]) -> None:
        """Record what one step trained on, all or none."""
        ...

    def tally(self, after: int, since: int, reached: int, now: PolicyVersion) -> Tally:
        """Count the tokens of the run's own rollouts: those with ids above `after`, those first used by version `since`
        or later, and those not used yet. `reached` is the last problem of the stream that was used before."""
        ...

    def flush(self) -> None:
        """Write what `add` and `record` may have deferred."""
        ...


class Supplied(NamedTuple):
    """What a draw finds among the groups that the run generated for it."""

    needed: int
    """How many of them it takes, if there are enough."""
    ready: set[int]
    """The positions in the task's stream of those that can be drawn."""


class OrderedStore(Store, Protocol):
    """A store that draws new groups in the order of the task's stream, whatever the order of their arrival."""

    def supplied(self, groups: int, group_size: int, now: PolicyVersion) -> Supplied:
        """What a draw of `groups` groups would find."""
        ...

    def leave_out(self, visits: Iterable[int]) -> None:
        """Never draw the groups of these positions in the task's stream as new ones, whatever rewards they get."""
        ...


class Sink(Protocol):
    """Receives metrics."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...
