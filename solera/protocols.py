"""The interfaces between packages. Whatever fits one of these can take its place: the loop knows nothing else of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from solera.batch import Batch, Scored, Update
from solera.records import Completion, Group, Manifest, PolicyVersion, Prompt, Reward, Rollout, Sampling, Use

Metrics = Mapping[str, float]
"""Names are `room/quantity`."""


class Codec(Protocol):
    """Text to token ids and back."""

    unknown_id: int | None
    """The token that stands for what the vocabulary cannot spell; `None` where it can spell everything."""

    chats: bool
    """Whether the model has a chat template."""

    max_length: int | None
    """Most tokens that the model reads, prompt and responses together; `None` where it has no limit."""

    def encode(self, text: str) -> tuple[int, ...]: ...

    def response(self, text: str, ended: bool) -> tuple[int, ...]:
        """What someone wrote after a prompt, with the end token where they had finished."""
        ...

    def chat(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """A conversation through the model's chat template, up to where its next message begins."""
        ...

    def decode(self, token_ids_T: npt.NDArray[np.int32]) -> str:
        """The text without its final end token. Other special tokens stay visible, or they could pass a grader."""
        ...


class Generate(Protocol):
    """What a task calls to let the policy write: the whole text so far in, what follows out. Call it once a turn.

    Where the text leaves less room than `sampling.max_tokens` in the model's context, the completion ends there, with
    `finish_reason = "length"`; where it leaves none, the completion is empty. The episode should end then.
    """

    async def __call__(self, token_ids: tuple[int, ...]) -> Completion: ...


class Task(Protocol):
    """Where prompts and grades come from. One turn or many, with tools or without: `run` is the episode."""

    def prompt(self, index: int) -> Prompt:
        """Problem `index` of the endless training stream, the same at every call."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """Up to `count` problems that the training stream never shows."""
        ...

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        """One attempt. Rewards already known stand in the rollout; others may come to the store later.

        The rollout must hold what `generate` was given and what it returned, token for token. Completions may be left
        out of it, but not changed.
        """
        ...


@dataclass(frozen=True)
class Weights:
    """Versioned weights on their way: whose they are, and their tensors one by one. Their digests stay with the sender:
    whoever takes them can name the values only by reading them."""

    lineage: str
    version: int
    tensors: Iterator[tuple[str, Any]]


class Engine(Protocol):
    """Who writes responses, with weights of its own."""

    dtype: str
    """Type that its weights are held in, as torch writes it. Tensors are cast to it before they are sent."""

    def load(self, weights: Weights) -> Manifest:
        """Take new weights; answers with what it now holds, its digests taken from its own memory after loading."""
        ...

    def weights(self) -> Weights:
        """What it holds in memory of its own, to be given back to it when a run is resumed."""
        ...

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Continue one text. The same weights and seed give the same tokens, whatever else is in flight.

        A text that the model cannot read is refused with `BadRequestError`, and no other request with it.
        """
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

    def restore(self, lineage: str, version: int, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's `state`. Its weights are loaded already."""
        ...


class Supply(Protocol):
    """Keeps the store supplied with groups to draw."""

    def wait(self, groups: int, now: PolicyVersion) -> int:
        """Return once the learner, at version `now`, can draw that many groups; returns how many tokens were generated.

        Fewer can be drawn if responses stay without a reward. The next call then writes what is missing.
        """
        ...

    def drawn(self, ahead: int) -> None:
        """The batch is drawn. Up to `ahead` groups of the next one may be written while it is learned from.

        Until the next `wait`, the engine then keeps its weights, and nobody else uses it or the task.
        """
        ...

    def take_metrics(self) -> Metrics:
        """What happened since the last call."""
        ...

    def state(self) -> int:
        """For a checkpoint: the position in the task's stream at which to continue."""
        ...

    def restore(self, state: int) -> None: ...

    def close(self) -> None: ...


class Store(Protocol):
    """The ledger. Everything generated goes in; everything trained comes out."""

    selective: bool
    """Whether rollouts that have their rewards may be passed over."""

    def add(self, rollouts: list[Rollout]) -> list[int]:
        """Write rollouts with the rewards they bring, all or none, by the next `flush` at the latest; returns ids by
        which `draw` and `record` know them."""
        ...

    def add_at_once(self, rollouts: list[Rollout]) -> list[int]:
        """Write rollouts before this returns; their ids are final."""
        ...

    def add_reward(self, rollout_id: int, reward: Reward) -> None:
        """A reward that came later. A higher revision of the same part replaces the earlier one. Refused for what
        nothing learns from: a probe's, or what a resume set aside."""
        ...

    def missing(self, groups: int, group_size: int, reserve: int, now: PolicyVersion) -> int:
        """Groups to write before that many can be drawn with a reserve left; 0 where enough are there."""
        ...

    def draw(self, groups: int, group_size: int, now: PolicyVersion) -> list[Group]:
        """Up to that many groups of rewarded rollouts, by the store's policy; none of a probe. `now` is what the
        learner holds: ages are counted up to it."""
        ...

    def fetch(self, ids: list[int]) -> list[Rollout]:
        """Those of them that have rewards, in the order of their ids."""
        ...

    def passed_over(self) -> Mapping[str, int]:
        """Rollouts that the last draw could not take, by reason."""
        ...

    def watermark(self) -> int:
        """The last rollout's id; 0 where there is none."""
        ...

    def uses_before(self, version: int) -> tuple[int, int]:
        """How many uses of earlier versions are recorded, and the sum of their rollouts' ids."""
        ...

    def record(self, uses: list[Use]) -> None:
        """Note what one step learned from, all or none."""
        ...

    def flush(self) -> None:
        """Write what `add` and `record` may have left for a moment when nobody waits."""
        ...


class Sink(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...
