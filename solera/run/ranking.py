"""Starts the ranks and the engines of a run's `[cluster]`. Ray is imported only for a run that uses it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from solera.config import ClusterConfig
from solera.engines.pool import EnginePool
from solera.engines.vllm.launch import GPU_MEMORY
from solera.errors import SoleraError
from solera.folder.paths import SERVER
from solera.models.loading import Source
from solera.run.parts import Parts
from solera.run.serving import ours_of, size_of
from solera.sharded.processes import Processes
from solera.sharded.rank import LearnerSpec, make_rank
from solera.sharded.ranks import Host, Ranks

if TYPE_CHECKING:
    from solera.cluster.bundles import Beside
    from solera.cluster.engines import EngineSpec
    from solera.cluster.servers import ServerSpec


def check_runtime(cluster: ClusterConfig) -> None:
    """Refuse a run whose ranks or engines need a package that is missing."""
    if cluster.engines or (cluster.learners and cluster.runtime == "ray"):
        from solera.cluster.connection import need_ray

        need_ray()


def open_ranks(cluster: ClusterConfig, spec: LearnerSpec, say: Callable[[str], None]) -> Ranks:
    """Start the ranks of a learner and wait until all are ready."""
    host = _host(cluster, spec)
    ranks = Ranks(host, cluster.timeout)
    say(f"{cluster.learners} ranks train the model: {host.where()}")
    return ranks


def _host(cluster: ClusterConfig, spec: LearnerSpec) -> Host:
    make = partial(make_rank, spec)
    if cluster.runtime == "processes":
        return Processes(cluster.learners, make, cluster.timeout)
    from solera.cluster.actors import Actors

    on_gpu, cpus = spec.device == "cuda", cluster.learners + cluster.engines
    return Actors(
        cluster.learners, make, cluster.timeout, cluster.address, cpus, cluster.gpus_per_learner if on_gpu else 0.0,
        beside_of(cluster) if on_gpu else None,
    )  # fmt: skip


def beside_of(cluster: ClusterConfig) -> "Beside | None":
    """The engines that share GPUs with ranks: those whose share and a rank's are a GPU or less."""
    from solera.cluster.bundles import Beside

    together = round(cluster.gpus_per_learner + cluster.gpus_per_engine, 4) <= 1
    return Beside(cluster.engines, cluster.gpus_per_engine) if cluster.engines and together else None


def open_engines(parts: Parts, folder: Path, count: Callable[[int], None], host: Host | None = None) -> EnginePool:
    """The engines of `cluster.engines`, as one engine. `count` is told what all of them have sampled so far. Logs of
    vLLM servers go to `folder`. `host` is where the ranks run."""
    from solera.cluster.actors import Actors
    from solera.cluster.engines import ActorPool

    cluster = parts.config.cluster
    pool = ActorPool(
        engine_spec(parts, folder), cluster.engines, cpus=cluster.learners + cluster.engines, address=cluster.address,
        timeout=parts.config.engine.timeout, tell=count, say=parts.say, transport=parts.config.sync.transport,
        bundles=host.bundles if isinstance(host, Actors) else None,
    )  # fmt: skip
    names = ", ".join(member.name for member in pool.members)
    parts.say(f"{cluster.engines} engines generate: {names}")
    return pool


def engine_spec(parts: Parts, folder: Path) -> "EngineSpec | ServerSpec":
    """What each actor gets. An engine that is started later finds the same model, also if the hub has another then."""
    assert parts.source is not None, "load_parts says where the model came from"
    source = parts.source.absolute().pinned()
    return _server_spec(parts, source, folder) if parts.config.engine.name == "vllm" else _own_spec(parts, source)


def _own_spec(parts: Parts, source: Source) -> "EngineSpec":
    from solera.cluster.engines import EngineSpec

    threads = max(1, torch.get_num_threads() // parts.config.cluster.engines)
    return EngineSpec(
        source, parts.compute, parts.config.engine.max_rows, threads, parts.device.type,
        _gpus_of(parts), compiled=parts.config.model.compile,
    )  # fmt: skip


def _gpus_of(parts: Parts) -> float:
    """What each engine gets."""
    return parts.config.cluster.gpus_per_engine if parts.device.type == "cuda" else 0.0


def _server_spec(parts: Parts, source: Source, folder: Path) -> "ServerSpec":
    from solera.cluster.servers import ServerSpec

    config = parts.config
    if parts.model.adapter is not None:
        raise SoleraError(
            "cluster.engines: vLLM servers in Ray actors cannot add LoRA adapters: use engine.launch, or engine.name = "
            "in_process"
        )
    longest = len(parts.task.prompt(0).token_ids)
    return ServerSpec(
        source, ours_of(parts, longest), size_of(parts),
        config.engine.gpu_memory or GPU_MEMORY if parts.device.type == "cuda" else None,
        config.engine.args, folder.absolute() / SERVER, config.engine.timeout, config.cluster.engines,
        _gpus_of(parts),
    )  # fmt: skip
