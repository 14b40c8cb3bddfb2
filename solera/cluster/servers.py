"""vLLM servers inside Ray actors. Each actor starts a server on its machine and is its only client.

Weights reach the actor as they reach any other engine in an actor. It passes them on to its server in a file, which is
in the machine's shared memory if they fit there. So the server needs no port that other machines can reach.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from solera.engines.vllm import checks, launch
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.opening import Reading, connect
from solera.engines.vllm.transport import FileTransport, transfer_folder
from solera.models.loading import Source, load_reader


@dataclass(frozen=True)
class ServerSpec:
    """What an actor must know to start its server."""

    source: Source
    """The model to start with. Its weights are replaced at the first sync."""
    ours: checks.Ours
    size: int
    """Bytes of the weights."""
    gpu_memory: float | None
    """Share of the GPU's memory that the server may use; `None` on a CPU."""
    args: tuple[str, ...]
    folder: Path
    """For the servers' logs."""
    timeout: float
    together: int
    """Servers that may share a machine."""
    gpus: float = 0.0
    """What Ray gives the actor."""
    shares_gpu = False
    """vLLM keeps its memory (`gpu_memory`)."""
    starting = launch.SLOWEST + 60.0
    """Seconds in which the actor must be ready."""

    def open(self, number: int) -> VllmEngine:
        """Start the server and connect to it. It ends with this process."""
        passing = transfer_folder(Path(tempfile.gettempdir()) / f"solera-{os.getpid()}-weights", self.size)
        path, on_gpu = self.source.where(), self.gpu_memory is not None
        codec = load_reader(path).codec
        launched = launch.launch(
            path, dtype=self.ours.dtype, max_length=self.ours.max_length, on_gpu=on_gpu,
            gpu_memory=self.gpu_memory, args=self.args, folder=self.folder, passing=passing, say=_nobody_reads,
            number=number, together=self.together,
        )  # fmt: skip
        try:
            return connect(
                launched.url, self.ours, Reading(codec.end_token_ids, codec.decode), lambda _: FileTransport(passing),
                timeout=self.timeout, launched=launched,
            )  # fmt: skip
        except BaseException:
            launched.close()
            raise


def _nobody_reads(sentence: str) -> None:
    """An actor has no console. The server's log has more."""
