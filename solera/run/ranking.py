"""Starts the ranks and the engines of a run's `[cluster]`. Ray is imported only for a run that uses it."""

from collections.abc import Callable
from functools import partial

import torch

from solera.config import ClusterConfig
from solera.engines.pool import EnginePool
from solera.run.parts import Parts
from solera.sharded.processes import Processes
from solera.sharded.rank import LearnerSpec, make_rank
from solera.sharded.ranks import Host, Ranks


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

    return Actors(cluster.learners, make, cluster.timeout, cluster.address, cluster.learners + cluster.engines)


def open_engines(parts: Parts, count: Callable[[int], None]) -> EnginePool:
    """The engines of `cluster.engines`, as one engine. `count` is told what all of them have sampled so far."""
    from solera.cluster.engines import ActorPool, EngineSpec

    cluster, config, source = parts.config.cluster, parts.config.engine, parts.source
    assert source is not None, "load_parts says where the model came from"
    threads = max(1, torch.get_num_threads() // cluster.engines)
    pool = ActorPool(
        EngineSpec(source.absolute(), parts.compute, config.max_rows, threads), cluster.engines,
        cpus=cluster.learners + cluster.engines, address=cluster.address, timeout=config.timeout, tell=count,
        say=parts.say,
    )  # fmt: skip
    names = ", ".join(member.name for member in pool.members)
    parts.say(f"{cluster.engines} engines generate: {names}")
    return pool
