"""The connection of this process to a Ray cluster. Ranks and engines share it; the last one to leave ends it."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from solera.errors import SoleraError, one_line

QUICK_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""A lost machine is noticed after 9 seconds. Ray's own settings need more than a minute."""
NOT_FOUND = (
    "cluster.address: cannot join a Ray cluster at {} (if it runs, it may want its token: set RAY_AUTH_MODE=token, and "
    "RAY_AUTH_TOKEN_PATH to a file with what `ray get-auth-token` prints on its head)"
)
"""Ray does not say whether nobody answered or the token was wrong."""


class Connection:
    """Counts who uses Ray in this process."""

    def __init__(self) -> None:
        self._users = 0
        self._ours = False
        """Whether Solera connected. Otherwise the connection was there before, and stays."""
        self._lock = threading.Lock()

    def join(self, cpus: int, address: str | None) -> Any:
        """Join the Ray cluster at `address`, or start Ray here with at least so many CPUs. Returns the package ray."""
        ray = need_ray()
        with self._lock:
            if not ray.is_initialized():
                _connect(ray, cpus, address)
                self._users, self._ours = 0, True
            self._users += 1
        return ray

    def leave(self) -> None:
        """The last one to leave ends what `join` began."""
        with self._lock:
            self._users -= 1
            if self._ours and not self._users:
                need_ray().shutdown()
                self._ours = False


CONNECTION = Connection()


def _connect(ray: Any, cpus: int, address: str | None) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray would report its use over the network
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        here = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        for name, value in QUICK_CHECKS.items():
            os.environ.setdefault(name, value)
    try:
        with _same_signals():
            ray.init(**({"address": "local", **here} if address is None else {"address": address}), **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        failed = "Ray cannot be started" if address is None else NOT_FOUND.format(address)
        raise SoleraError(f"{failed}: {one_line(error)}") from error


@contextmanager
def _same_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, which ends a run after its checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def address_of_node(ray: Any) -> str:
    """The address by which other nodes of the cluster know this one."""
    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)


def need_ray() -> Any:
    """The package ray. It is told not to start by itself when it is called after its end, by a thread that opens an
    engine, for instance."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
    except ImportError:
        raise SoleraError(
            "cluster.runtime = ray needs the package ray: pip install 'solera[cluster]', or use --cluster.runtime "
            "processes on this machine"
        ) from None
    return ray
