"""Stand-in for the engine of a run that generates nothing."""

from solera.config import InFlight
from solera.protocols import Weights, Work
from solera.records import Completion, Manifest, Sampling


class NoEngine:
    """An engine that takes no weights and generates nothing."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.work = Work()
        self.slots = 0
        self.version = 0
        self.sampled = 0

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        return Manifest(weights.lineage, weights.version, ())

    def weights(self) -> Weights:
        return Weights("", 0, iter(()))

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        raise AssertionError("a run that generates nothing was asked to")

    def close(self) -> None:
        return
