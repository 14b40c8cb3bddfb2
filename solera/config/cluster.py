"""The section `[cluster]`: several processes that train one model together."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClusterConfig:
    """Train with several processes, called ranks, which divide the model's weights among them (docs/cluster.md)."""

    learners: int = 0
    """Number of ranks. 0 trains in the main process, without ranks."""
    engines: int = 0
    """Number of engines, each a Ray actor with a copy of the model. With `engine.name = "vllm"`, each actor starts a
    vLLM server on its machine. 0 generates in the main process, or on the servers of `engine.urls` and
    `engine.launch`."""
    runtime: Literal["ray", "processes"] = "ray"
    """What runs the ranks. `ray`: Ray actors (needs the extra `cluster`). `processes`: processes on this machine,
    without Ray. Engines are always Ray actors."""
    address: str | None = None
    """For `ray`: the address of a running Ray cluster, such as 10.0.0.1:6379, or `auto` for the cluster that this
    machine belongs to. If unset, Solera starts Ray on this machine and stops it at the end."""
    timeout: float = 120.0
    """Seconds that a rank waits for the others before the update fails, and that a run waits for free CPUs in the Ray
    cluster."""
    restarts: int = 3
    """How often Solera starts all ranks again from the last checkpoint, after one of them died or hung. After that, the
    run stops."""
    gpus_per_learner: float = 1.0
    """On a machine with GPUs: the number of GPUs that Ray reserves for each rank. With a fraction, such as 0.5, ranks
    share a GPU with each other, or with engines (`gpus_per_engine`)."""
    gpus_per_engine: float = 1.0
    """On a machine with GPUs: the number of GPUs that Ray reserves for each engine. If a rank and an engine together
    need at most one GPU, each engine shares the GPU of a rank. An engine with a fraction of a GPU frees its key-value
    cache whenever it has nothing to write, so that ranks can use the memory."""
