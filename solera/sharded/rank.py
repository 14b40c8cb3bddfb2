"""What one rank of a sharded learner does. How ranks are started and called is in `processes.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from solera.batch import FloatArray
from solera.config import LearnConfig
from solera.engines.groups import gpu_of
from solera.engines.messages import Copied, Joined, copied, parted
from solera.learner.learner import Learner
from solera.learner.portions import Findings, Portion
from solera.learner.reference import Reference
from solera.models.digest import describe
from solera.models.language_model import LanguageModel
from solera.models.small import suit
from solera.models.unloaded import Unloaded
from solera.objectives.objective import Objective
from solera.records import Manifest, Rollout, TensorSpec
from solera.sharded.effort import Effort, Waiting, peak_memory
from solera.sharded.exporting import Share, write_share
from solera.sharded.model import ShardedModel, part_of

T = TypeVar("T")
STARTING = 300.0
"""Seconds in which all ranks must have started."""


@dataclass(frozen=True)
class Seat:
    """The place of a rank among all ranks."""

    rank: int
    count: int
    address: str
    """Where the ranks meet: `file://…` or `tcp://host:port`."""
    timeout: float
    """Seconds after which a collective operation fails."""
    threads: int = 1


@dataclass(frozen=True)
class LearnerSpec:
    """What every rank must know to make its part of the learner."""

    load: Callable[[], LanguageModel | Unloaded]
    """Returns the model with float32 weights, or where they are. Every call and every rank must get the same weights.
    """
    objective: Objective
    config: LearnConfig
    lineage: str
    temperature: float
    limit: int
    steps: int
    compute: torch.dtype
    device: str = "cpu"
    """Or `cuda`."""


class GroupPeers:
    """The ranks of a process group. They talk over gloo. Tensors on GPUs travel over NCCL, unless ranks share a GPU,
    which NCCL refuses."""

    def __init__(self, seat: Seat, device: str = "cpu") -> None:
        torch.set_num_threads(seat.threads)
        self.device = _device_of(seat, device)
        dist.init_process_group(
            "gloo", init_method=seat.address, rank=seat.rank, world_size=seat.count,
            timeout=timedelta(seconds=STARTING),
        )  # fmt: skip
        # Ranks may start long after each other, so the short time limit belongs to a group of its own.
        limit = timedelta(seconds=seat.timeout)
        self.group = dist.new_group(timeout=limit)
        self.rank, self.count = seat.rank, seat.count
        self.waiting = Waiting()
        self.of_tensors = dist.new_group(timeout=limit, backend="nccl") if self._have_own_gpus() else self.group
        """The group that gathers weights and reduces gradients."""

    def most(self, number: int) -> int:
        return self._agree(number, dist.ReduceOp.MAX)

    def least(self, number: int) -> int:
        return self._agree(number, dist.ReduceOp.MIN)

    def gather(self, mine: list[T]) -> list[T]:
        each: list[Any] = [None] * self.count
        with self.waiting:
            dist.all_gather_object(each, mine, self.group)
        return [one for several in each for one in several]

    def _have_own_gpus(self) -> bool:
        if self.device.type != "cuda":
            return False
        return len(set(self.gather([gpu_of(self.device)]))) == self.count

    def _agree(self, number: int, how: Any) -> int:
        agreed = torch.tensor(number)
        with self.waiting:
            dist.all_reduce(agreed, how, self.group)
        return int(agreed)


class Rank:
    """All ranks get the same calls in the same order. What is gathered is returned by rank 0."""

    def __init__(self, spec: LearnerSpec, peers: GroupPeers) -> None:
        self.first, self.waiting, self.peers = peers.rank == 0, peers.waiting, peers
        self.held: Joined | None = None
        """The weights that rank 0 has gathered last."""
        mesh = DeviceMesh.from_group(peers.of_tensors, peers.device.type)
        loaded = spec.load()
        suit(loaded.module)
        self._named_as_files = isinstance(loaded, Unloaded) and loaded.named_as_files
        model = ShardedModel(loaded, mesh, self.waiting)
        reference = None
        if spec.objective.uses_reference:
            copied = partial(_frozen, spec, mesh, self.waiting)
            reference = Reference(model, spec.objective.ref_period, spec.objective.ref_ema, spec.compute, copied)
        self.learner = Learner(
            model, spec.objective, spec.config, lineage=spec.lineage, temperature=spec.temperature, limit=spec.limit,
            steps=spec.steps, compute=spec.compute, reference=reference, peers=peers,
        )  # fmt: skip

    def learn(self, portions: list[Portion]) -> tuple[Findings, Effort]:
        before = self.waiting.seconds
        found = self.learner.learn(portions)
        texts = [text for portion in portions for rollout in portion.rollouts for text in rollout.sequences]
        tokens = sum(len(text.token_ids_T) for text in texts)
        return found, Effort(tokens, self.waiting.seconds - before, peak_memory(self.peers.device))

    def score(self, rollouts: tuple[Rollout, ...]) -> FloatArray:
        return self.learner.score(rollouts).logp_T

    def sizes(self, dtype: str) -> list[tuple[str, int]]:
        """Name and bytes of each weight, in the order in which weights travel."""
        bytes_each = _kind(dtype).itemsize
        return [(name, bytes_each * p.numel()) for name, p in self.learner.model.parameters().items()]

    def gather(self, names: Sequence[str], dtype: str, described: bool) -> tuple[Copied, tuple[TensorSpec, ...]] | None:
        """Some weights, each gathered completely. Rank 0 holds them until `let_go`."""
        self.let_go()
        model = self.learner.model
        assert isinstance(model, ShardedModel)
        whole_N = model.end_to_end(names, _kind(dtype))
        if not self.first:
            return None
        self.held = Joined(tuple((name, tuple(model.parameters()[name].shape)) for name in names), whole_N)
        return copied(self.held), describe(parted(*self.held).items()) if described else ()

    def let_go(self) -> None:
        self.held = None

    def manifest(self, dtype: str) -> Manifest | None:
        """Describe the weights, one gathered tensor after the other."""
        manifest = self.learner.manifest(dtype)
        return manifest if self.first else None

    def exports(self) -> bool:
        """Whether the names of the parameters are those of a Hugging Face folder. Otherwise transformers translates
        them, for which it needs the whole model, or peft writes the adapters."""
        return self._named_as_files

    def export(self, folder: str) -> Share:
        """Write this rank's share of the weights."""
        return write_share(self.learner.model, self.peers.rank, self.peers.count, Path(folder))

    def save(self, folder: str) -> None:
        self.learner.save(Path(folder))

    def restore(self, lineage: str, version: int, state: dict[str, Any] | Path) -> None:
        """Continue from a folder that ranks saved, or from the state of a learner in one process."""
        self.learner.restore(lineage, version, state if isinstance(state, Path) else self._part_of(state))

    def _part_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a state that every rank has."""
        parameters = list(self.learner.model.parameters().values())
        moments = {
            number: {
                name: part_of(value, parameters[number]) if value.shape == parameters[number].shape else value
                for name, value in of_one.items()
            }
            for number, of_one in state["optimiser"]["state"].items()
        }
        reference = state["reference"]
        if reference:
            named = self.learner.model.parameters()
            reference = {name: part_of(value, named[name]) for name, value in reference.items()}
        return {**state, "optimiser": {**state["optimiser"], "state": moments}, "reference": reference}


def _frozen(spec: LearnerSpec, mesh: DeviceMesh, waiting: Waiting) -> ShardedModel:
    """A second copy of the weights, for the reference policy."""
    return ShardedModel(spec.load(), mesh, waiting, trained=False)


def make_rank(spec: LearnerSpec, seat: Seat) -> Rank:
    """What a process or an actor does to become a rank."""
    return Rank(spec, GroupPeers(seat, spec.device))


def _kind(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _device_of(seat: Seat, kind: str) -> torch.device:
    """The GPUs that this process sees are divided among the ranks. A Ray actor sees only its own."""
    if kind != "cuda":
        return torch.device("cpu")
    found = torch.device("cuda", seat.rank % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found
