"""Starts the ranks of a run (`[cluster]`)."""

from functools import partial

from solera.config import ClusterConfig
from solera.sharded.processes import Processes
from solera.sharded.rank import LearnerSpec, make_rank
from solera.sharded.ranks import Ranks


def open_ranks(cluster: ClusterConfig, spec: LearnerSpec) -> Ranks:
    """Start the ranks of a learner. Ray is imported only here, and only if it is to run them."""
    make = partial(make_rank, spec)
    return Ranks(Processes(cluster.learners, make, cluster.timeout), cluster.timeout)
