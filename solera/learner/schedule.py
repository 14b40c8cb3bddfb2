"""The learning rate as a pure function of how far the run is."""

import math

from solera.config import LearnConfig


def learning_rate(config: LearnConfig, version: int, steps: int) -> float:
    """Rate for the batch that follows `version`: a linear warm-up, then constant, or down to zero at `steps`.

    >>> [round(learning_rate(LearnConfig(lr=1.0, warmup=2, decay="linear"), k, 6), 2) for k in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    assert config.lr is not None, "resolve the config first"
    if version < config.warmup:
        return config.lr * (version + 1) / config.warmup
    progress = (version - config.warmup) / max(1, steps - config.warmup)
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return config.lr * factor[config.decay]
