"""How a sweep starts processes."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess

LINUX = sys.platform == "linux"
PROCESSES = multiprocessing.get_context("forkserver") if LINUX else multiprocessing.get_context("spawn")
"""On Linux, a server process loads torch and transformers once, and each run is forked from it. This saves a few
seconds per run. The server never uses CUDA, because a forked process could not use it then."""
PROCESSES.set_forkserver_preload(
    [
        "solera.run.running",
        "torch._dynamo",
        "transformers.modeling_utils",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
    ]
)


def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that calls `target`."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it loads torch; in a run, `run.threads` applies
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    return process
