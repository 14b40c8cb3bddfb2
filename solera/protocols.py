"""The seams between the rooms. Whoever fits one of these can take its place; the loop knows nothing else of them."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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

    - `max_tokens`: most tokens of this turn, in place of `sampling.max_tokens`. Where the text leaves less room in the
      model's context, the completion ends there with `finish_reason = "length"`. Where it leaves none, the completion
      is empty. The episode should end then.
    - `stop`: a text, or several. The completion ends with the token that completes one of them, and holds it;
      `finish_reason` is `"stop"`.
    - `temperature`: for this turn, in place of the run's. `behaviour_logp` is then of the distribution that was sampled
      from, at this temperature; the learner's `logp`, `proximal_logp` and `ref_logp` stay at the run's temperature. So
      importance weights against `behaviour_logp` stay correct. An objective that does not use it takes these tokens for
      its own policy's, and `mismatch/logp` and the divergences count the difference. 0 has no such weights: it is
      refused unless the run itself is greedy, as an evaluation may be.
    """

    async def __call__(
        self,
        token_ids: tuple[int, ...],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        temperature: float | None = None,
    ) -> Completion: ...


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


class Engine(Protocol):
    """Who writes responses, with weights of its own."""

    work: Work
    """What it has done so far."""

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
