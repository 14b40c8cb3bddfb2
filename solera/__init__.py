"""Solera: group-relative policy optimisation on experience of any age and origin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solera.build import Result, evaluate_models, resume, train
    from solera.config import (
        CheckpointConfig,
        CollectConfig,
        Config,
        EngineConfig,
        EvaluateConfig,
        LearnConfig,
        ModelConfig,
        ObjectiveConfig,
        ReportConfig,
        RewardConfig,
        RunConfig,
        SamplingConfig,
        SyncConfig,
        TaskConfig,
        load,
    )
    from solera.errors import SoleraError
    from solera.evaluate.evaluation import Evaluation

__all__ = [
    "CheckpointConfig",
    "CollectConfig",
    "Config",
    "EngineConfig",
    "EvaluateConfig",
    "Evaluation",
    "LearnConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ReportConfig",
    "Result",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "SoleraError",
    "SyncConfig",
    "TaskConfig",
    "evaluate_models",
    "load",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    """Names load with their first use: torch with `train`, and nothing for the command's help."""
    if name not in __all__:
        raise AttributeError(f"module 'solera' has no attribute {name!r}")
    built = dict.fromkeys(("train", "resume", "evaluate_models", "Result"), "build")
    elsewhere = {"SoleraError": "errors", "Evaluation": "evaluate.evaluation"}
    room = (built | elsewhere).get(name, "config")
    return getattr(importlib.import_module(f"solera.{room}"), name)
