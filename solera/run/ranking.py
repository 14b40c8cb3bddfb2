"""Starts the ranks of a run (`[cluster]`)."""

from collections.abc import Callable
from functools import partial

from solera.config import ClusterConfig
from solera.sharded.processes import Processes
from solera.sharded.rank import LearnerSpec, make_rank
from solera.sharded.ranks import Host, Ranks


def check_runtime(cluster: ClusterConfig) -> None:
    """Refuse a run whose ranks need a package that is missing."""
    if cluster.learners and cluster.runtime == "ray":
        from solera.cluster.actors import need_ray  # Ray is imported only for a run that uses it

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

    return Actors(cluster.learners, make, cluster.timeout, cluster.address)
