"""Solera: group-relative policy optimisation on experience of any age and origin."""

from typing import TYPE_CHECKING

from solera.config import (
    CollectConfig,
    Config,
    EngineConfig,
    EvaluateConfig,
    LearnConfig,
    ModelConfig,
    ObjectiveConfig,
    ReportConfig,
    RunConfig,
    SamplingConfig,
    SyncConfig,
    TaskConfig,
)
from solera.errors import SoleraError

if TYPE_CHECKING:
    from solera.build import Result


def train(config: Config) -> "Result":
    """Train from a config to a finished model in the run's folder."""
    from solera.build import train as run  # torch loads here, not with the package

    return run(config)


__all__ = [
    "CollectConfig",
    "Config",
    "EngineConfig",
    "EvaluateConfig",
    "LearnConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ReportConfig",
    "RunConfig",
    "SamplingConfig",
    "SoleraError",
    "SyncConfig",
    "TaskConfig",
    "train",
]
