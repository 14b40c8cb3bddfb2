"""An engine that counts what it returns, for one purpose."""

from solera.config import InFlight
from solera.folder.counts import Counts
from solera.protocols import Engine, Weights, Work
from solera.records import Completion, Manifest, Sampling


class Metered:
    """Passes everything on to an engine. Counts the tokens of the completions under `purpose` (`folder/counts.py`)."""

    def __init__(self, engine: Engine, counts: Counts, purpose: str) -> None:
        self.engine = engine
        self.counts = counts
        self.purpose = purpose
        self.dtype = engine.dtype

    @property
    def slots(self) -> int:
        return self.engine.slots

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def work(self) -> Work:
        return self.engine.work

    @property
    def sampled(self) -> int:
        return self.engine.sampled

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        return self.engine.load(weights, in_flight)

    def weights(self) -> Weights:
        return self.engine.weights()

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        completion = await self.engine.generate(token_ids, sampling, seed)
        self.counts.add(self.purpose, len(completion.token_ids_T))
        return completion

    def close(self) -> None:
        self.engine.close()
