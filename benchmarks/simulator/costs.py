"""What decoding, learning and syncing cost in seconds, and what they need in bytes.

Each cost is a sum of physical terms (bytes over bandwidth, operations over speed, a fixed time per layer).
`calibration` fits their constants to measurements. An *engine* is a group of GPUs that holds one copy of the model.
"""

from dataclasses import dataclass

GB = 1e9
KEPT = 22
"""Bytes of activations per token, layer and hidden unit: 0.38 MB per token of SmolLM2 (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class Gpu:
    """Bytes and operations per second. `link` connects the GPUs of a node, `network` the nodes; both per GPU."""

    speed: float
    """Operations per second of 16-bit matrix products, as measured with large matrices."""
    bandwidth: float
    memory: float
    link: float
    network: float
    per_node: int = 8


GPUS = {
    "h200": Gpu(790e12, 4.8e12, 141 * GB, 450 * GB, 50 * GB),
    "h100": Gpu(790e12, 3.35e12, 80 * GB, 450 * GB, 50 * GB),
    "h20": Gpu(118e12, 4.0e12, 96 * GB, 450 * GB, 50 * GB),
    "h800": Gpu(790e12, 3.35e12, 80 * GB, 200 * GB, 50 * GB),
    "gb200": Gpu(2000e12, 8e12, 186 * GB, 900 * GB, 50 * GB, per_node=4),
}
"""The speed of the H200 was measured. The other speeds are the same share (0.8) of the data sheet's."""
MOST_AT_ONCE = 32_768
"""Tokens of a micro-batch on each learner, if memory allows."""


@dataclass(frozen=True)
class Model:
    parameters: float
    layers: int
    hidden: int
    key_values: int
    """Values cached per token and layer: two for each number of a key-value head."""

    @property
    def cached_bytes(self) -> float:
        """Of one token."""
        return 2.0 * self.layers * self.key_values


MODELS = {
    "smollm2": Model(134.5e6, 30, 576, 2 * 3 * 64),
    "1.5b": Model(1.56e9, 24, 2048, 2 * 8 * 64),
    "7b": Model(7.6e9, 28, 3584, 2 * 4 * 128),
    "32b": Model(32.8e9, 64, 5120, 2 * 8 * 128),
    "70b": Model(70.6e9, 80, 8192, 2 * 8 * 128),
}


@dataclass(frozen=True)
class Constants:
    """Fitted to measurements of Solera on one H200, except for the last three."""

    launch: float
    """Seconds per layer of one decoding step, however few the rows."""
    cache_share: float
    """Share of the bandwidth that attention reaches when it reads the cache."""
    product_share: float
    """Share of the speed that products reach in learning."""
    besides: float
    """Seconds per token and layer that a forward and backward pass takes besides products, for 1,024 hidden units. It
    grows with their root: a rule between the two sizes that were measured, not a law."""
    host: float
    """Seconds per layer that the host needs to launch a forward and backward pass."""
    reduce_latency: float = 1e-5
    """Seconds of an all-reduce without its bytes. Not measured."""
    sync_start: float = 0.1
    """Seconds of a sync without its bytes. From published times, like `sync_share`."""
    sync_share: float = 0.6
    """Share of the network that a sync reaches."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one model on one kind of GPU."""

    model: Model
    gpu: Gpu
    constants: Constants
    recompute: bool = True
    """Whether the learner computes activations again instead of keeping them: a third more operations."""

    def token(self, rows: float, context: float, gpus: int = 1) -> float:
        """Seconds in which one engine adds a token to each row, if rows have this many tokens on average."""
        if rows <= 0:
            return 0.0
        m, g, c = self.model, self.gpu, self.constants
        weights = 2 * m.parameters / (gpus * g.bandwidth)
        products = 2 * m.parameters * rows / (gpus * g.speed)
        cache = rows * context * m.cached_bytes / (gpus * g.bandwidth * c.cache_share)
        return max(weights, products) + cache + m.layers * c.launch + self._reduce(rows, gpus)

    def _reduce(self, rows: float, gpus: int) -> float:
        """Two all-reduces in each layer of an engine on several GPUs."""
        if gpus == 1:
            return 0.0
        sent = 2 * rows * self.model.hidden * 2 * (gpus - 1) / gpus
        return 2 * self.model.layers * (self.constants.reduce_latency + sent / self.gpu.link)

    def prefill(self, tokens: float, gpus: int = 1) -> float:
        return self._compute(tokens, 2) / gpus

    def learn(self, tokens: float, gpus: int = 1, per_gpu: float = MOST_AT_ONCE, slow: float = 1.0) -> float:
        """Seconds of one update over so many tokens, at most `per_gpu` at a time on each GPU. Shards of the weights are
        gathered twice and gradients summed once for each micro-batch, while others are computed. One learner needs
        `slow` times as long to compute as the others. All wait for it, because each has the same number of tokens."""
        micro_batches = max(1.0, -(-tokens // (per_gpu * gpus)))
        computed = self._compute(tokens / (gpus * micro_batches), 8 if self.recompute else 6)
        launched = self.constants.host * self.model.layers
        return micro_batches * max(slow * computed, slow * launched, self._gather(gpus))

    def _compute(self, tokens: float, operations: int) -> float:
        m, g, c = self.model, self.gpu, self.constants
        products = operations * m.parameters / (g.speed * c.product_share)
        besides = operations / 6 * c.besides * m.layers * (m.hidden / 1024) ** 0.5
        return tokens * (products + besides)

    def _gather(self, gpus: int) -> float:
        if gpus == 1:
            return 0.0
        wire = self.gpu.link if gpus <= self.gpu.per_node else self.gpu.network
        return 3 * 2 * self.model.parameters * (gpus - 1) / gpus / wire

    def sync(self, gpus: int = 1) -> float:
        """Seconds from a learner's weights to all engines of `gpus` GPUs, sent along a chain."""
        sent = 2 * self.model.parameters / (min(gpus, self.gpu.per_node) * self.gpu.network * self.constants.sync_share)
        return self.constants.sync_start + sent

    def engine_gpus(self, context: float) -> int:
        """Fewest GPUs (a power of 2, one node at most) whose memory holds the weights and 32 full rows."""
        gpus = 1
        needed = 2 * self.model.parameters + 32 * context * self.model.cached_bytes
        while gpus < self.gpu.per_node and needed > 0.85 * self.gpu.memory * gpus:
            gpus *= 2
        return gpus

    def rows(self, context: float, gpus: int, most: int = 1024) -> int:
        """Rows that fit into the memory of an engine."""
        free = 0.85 * self.gpu.memory * gpus - 2 * self.model.parameters
        return max(1, min(most, int(free / (context * self.model.cached_bytes))))

    def at_once(self, gpus: int, longest: int) -> float | None:
        """Tokens per micro-batch: halved until they fit into 0.9 of a learner's memory, but always enough for the
        longest text. `None` if that does not fit."""
        tokens = max(MOST_AT_ONCE, longest)
        while self.learner_bytes(gpus, tokens) >= 0.9 * self.gpu.memory:
            if tokens == longest:
                return None
            tokens = max(longest, tokens // 2)
        return tokens

    def learner_bytes(self, gpus: int, tokens: float = MOST_AT_ONCE) -> float:
        """Bytes on each learner: float32 weights, gradients and two moments, a 16-bit copy, and activations."""
        m = self.model
        kept = tokens * m.layers * (2 * m.hidden if self.recompute else KEPT * m.hidden)
        return 20 * m.parameters / gpus + kept + 2 * m.parameters / m.layers
