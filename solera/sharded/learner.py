"""The `Learner` of a run whose weights are divided among several ranks.

The controller computes what belongs to the whole minibatch and gives each rank its portion. It holds no weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from solera.batch import Batch, Scored, Update
from solera.engines.messages import messages, read
from solera.errors import SoleraError
from solera.learner.portions import balance, conclude, portions_of
from solera.models.language_model import LanguageModel
from solera.protocols import Gathered, Weights
from solera.records import Manifest, Rollout, TensorSpec
from solera.sharded.exporting import write_index
from solera.sharded.rank import LearnerSpec
from solera.sharded.ranks import Passing, Ranks


@dataclass(frozen=True)
class RankZero:
    """Sends weights to engines: a `Courier`."""

    gathering: Iterator[Gathered]
    ranks: Ranks

    def gather(self) -> Iterator[Gathered]:
        return self.gathering

    def send(self, receivers: Sequence[Any]) -> list[SoleraError | None]:
        return self.ranks.pass_on(receivers)


class ShardedLearner:
    """The policy being trained, over several ranks. The ranks were started with the same `spec`."""

    def __init__(self, spec: LearnerSpec, ranks: Ranks) -> None:
        self.spec = spec
        self.ranks = ranks
        self.lineage = spec.lineage
        self.version = 0
        self.compute = str(spec.compute).removeprefix("torch.")
        self._copied: dict[LanguageModel, int] = {}
        """The version that each model has which was given to `copy_to`."""
        self._sizes: dict[str, list[tuple[str, int]]] = {}
        """Name and bytes of each weight, by number format."""
        self._gathered: tuple[str, Manifest] | None = None
        """The current weights as they were last gathered for an engine, and in which number format."""

    def update(self, batch: Batch) -> Update:
        """Learn from a batch and advance the version."""
        portions = portions_of(
            batch, self.spec.objective, self.spec.config.minibatches, self.spec.limit, self.ranks.count
        )
        learned = self.ranks.call("learn", [(own,) for own in portions])
        update = conclude(batch, [found for found, _ in learned], self.version, self.lineage)
        for rank, (_, effort) in enumerate(learned):
            update.metrics.update(effort.metrics(rank))
        self.version += 1
        self._gathered = None
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
        """The current weights, each tensor gathered completely before it is passed on. If rank 0 can send them to
        engines itself, it is their courier."""
        gathering = self._gathering(dtype, described=True)
        tensors = (named for gathered in gathering for named in gathered.tensors.items())
        courier = RankZero(gathering, self.ranks) if isinstance(self.ranks.host, Passing) else None
        return Weights(self.lineage, self.version, tensors, lent=False, courier=courier)

    def manifest(self, dtype: str, shared: bool = False) -> Manifest:
        """What `weights(dtype)` are. If they were gathered, they were described then. No engine can share memory with
        weights that are divided."""
        assert not shared, "the weights of a sharded learner cannot be shared"
        if self._gathered is not None and self._gathered[0] == dtype:
            return self._gathered[1]
        return self._all("manifest", dtype)

    def state(self) -> dict[str, Any]:
        """Nothing: the ranks write their state themselves, with `save`."""
        return {}

    def save(self, folder: Path) -> None:
        """Write what a checkpoint needs beside the weights. Each rank writes its own part."""
        self._all("save", str(folder.absolute()))

    def export(self, folder: Path) -> bool:
        """Let the ranks write the weights of a Hugging Face folder. False if only the whole model can be written."""
        if not self._all("exports"):
            return False
        folder.mkdir()
        write_index(self.ranks.call("export", [(str(folder.absolute()),)] * self.ranks.count), folder)
        return True

    def restore(self, lineage: str, version: int, state: dict[str, Any] | Path) -> None:
        """Continue from a folder that any number of ranks saved, or from the state of a learner in one process. The
        ranks have loaded its weights."""
        self._all("restore", lineage, version, state.absolute() if isinstance(state, Path) else state)
        self.lineage, self.version, self._gathered = lineage, version, None

    @torch.no_grad()
    def copy_to(self, model: LanguageModel) -> None:
        """Put the current weights into a model of this process."""
        if self._copied.get(model) != self.version:
            own = model.parameters()
            for gathered in self._gathering(str(model.module.dtype), described=False):
                for name, tensor in gathered.tensors.items():
                    own[name].copy_(tensor)
            self._copied[model] = self.version

    def close(self) -> None:
        self.ranks.close()

    def _gathering(self, dtype: str, described: bool) -> Iterator[Gathered]:
        """The weights, as many at a time as travel together."""
        if dtype not in self._sizes:
            self._sizes[dtype] = self._all("sizes", dtype)
        specs = list[TensorSpec]()
        for several in messages(self._sizes[dtype], size=lambda named: named[1]):
            copy, own = self._all("gather", [name for name, _ in several], dtype, described)
            specs += own
            yield Gathered(read(copy), own)
        self._all("let_go")
        if described:
            self._gathered = dtype, Manifest(self.lineage, self.version, tuple(specs))

    def _all(self, method: str, *arguments: Any) -> Any:
        """The same call for every rank; returns what rank 0 returned."""
        return self.ranks.call(method, [arguments] * self.ranks.count)[0]
