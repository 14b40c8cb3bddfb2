"""The `Learner` of a run whose weights are divided among several ranks.

The controller computes what belongs to the whole minibatch and gives each rank its portion. It holds no weights.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from solera.batch import Batch, Scored, Update
from solera.learner.portions import balance, conclude, portions_of
from solera.protocols import Weights
from solera.records import Manifest, Rollout
from solera.sharded.rank import LearnerSpec


class Ranks(Protocol):
    """All ranks, wherever they run. Each is a `solera.sharded.rank.Rank`."""

    count: int

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on every rank, each with its own arguments; return what each returned."""
        ...

    def close(self) -> None: ...


class ShardedLearner:
    """The policy being trained, over several ranks. The ranks were started with the same `spec`."""

    def __init__(self, spec: LearnerSpec, ranks: Ranks) -> None:
        self.spec = spec
        self.ranks = ranks
        self.lineage = spec.lineage
        self.version = 0
        self.compute = str(spec.compute).removeprefix("torch.")

    def update(self, batch: Batch) -> Update:
        """Learn from a batch and advance the version."""
        portions = portions_of(
            batch, self.spec.objective, self.spec.config.minibatches, self.spec.limit, self.ranks.count
        )
        found = self.ranks.call("learn", [(own,) for own in portions])
        update = conclude(batch, found, self.version, self.lineage)
        self.version += 1
        return update

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Score responses, none of them empty, under the current policy."""
        sizes = [sum(len(sequence.token_ids_T) for sequence in rollout.sequences) for rollout in rollouts]
        owner_B = balance(sizes, self.ranks.count)
        given: list[tuple[Rollout, ...]] = [
            tuple(rollout for rollout, owner in zip(rollouts, owner_B, strict=True) if owner == rank)
            for rank in range(self.ranks.count)
        ]
        scored = self.ranks.call("score", [(own,) for own in given])
        lengths = [np.cumsum([rollout.length for rollout in own])[:-1] for own in given]
        responses = [iter(np.split(logp_T, ends)) for logp_T, ends in zip(scored, lengths, strict=True)]
        ordered = [next(responses[rank]) for rank in owner_B]
        return Scored.of(rollouts, np.concatenate([np.zeros(0, np.float32), *ordered]))

    def weights(self, dtype: str) -> Weights:
        """The current weights, gathered one tensor at a time, each completely before it is passed on."""
        return Weights(self.lineage, self.version, self._tensors(dtype))

    def manifest(self, dtype: str, shared: bool = False) -> Manifest:
        """What `weights(dtype)` are. No engine can share memory with weights that are divided."""
        assert not shared, "the weights of a sharded learner cannot be shared"
        return self._all("manifest", dtype)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights, gathered. A learner in one process can continue from it."""
        return self._all("state")

    def restore(self, lineage: str, version: int, state: dict[str, Any]) -> None:
        """Continue from the state of a learner over any number of ranks. The ranks have loaded its weights."""
        self._all("restore", lineage, version, state)
        self.lineage, self.version = lineage, version

    def close(self) -> None:
        self.ranks.close()

    def _tensors(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        for name in self._all("names"):
            yield name, self._all("tensor", name, dtype)

    def _all(self, method: str, *arguments: Any) -> Any:
        """The same call for every rank; returns what rank 0 returned."""
        return self.ranks.call(method, [arguments] * self.ranks.count)[0]
