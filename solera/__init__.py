"""Solera: group-relative policy optimisation on experience of any age and origin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solera.config import (
        CheckpointConfig,
        ClusterConfig,
        CollectConfig,
        Config,
        DiagnoseConfig,
        DrawConfig,
        EngineConfig,
        EvaluateConfig,
        LearnConfig,
        LoraConfig,
        ModelConfig,
        ObjectiveConfig,
        ReportConfig,
        RewardConfig,
        RunConfig,
        SamplingConfig,
        StoreConfig,
        SyncConfig,
        TaskConfig,
        load,
    )
    from solera.errors import SoleraError
    from solera.evaluate.evaluation import Evaluation
    from solera.models.classifier import Classifier
    from solera.objectives.objective import Objective, custom_objective
    from solera.objectives.terms import Term
    from solera.objectives.tokens import Tokens
    from solera.protocols import Codec, Generate, Task
    from solera.records import Completion, Prompt, Reward, Rollout, Sampling
    from solera.run.evaluating import evaluate_models
    from solera.run.running import Result, resume, train
    from solera.store.ledger import Ledger, open_store
    from solera.sync.rules import SyncState
    from solera.tasks.agent import Agent
    from solera.tasks.conversation import Conversation, Limits
    from solera.tasks.environments import EnvironmentTask
    from solera.tasks.judge_model import Judge
    from solera.tasks.mcp_tools import mcp_tools

__all__ = [
    "Agent",
    "CheckpointConfig",
    "Classifier",
    "ClusterConfig",
    "Codec",
    "CollectConfig",
    "Completion",
    "Config",
    "Conversation",
    "DiagnoseConfig",
    "DrawConfig",
    "EngineConfig",
    "EnvironmentTask",
    "EvaluateConfig",
    "Evaluation",
    "Generate",
    "Judge",
    "LearnConfig",
    "Ledger",
    "Limits",
    "LoraConfig",
    "ModelConfig",
    "Objective",
    "ObjectiveConfig",
    "Prompt",
    "ReportConfig",
    "Result",
    "Reward",
    "RewardConfig",
    "Rollout",
    "RunConfig",
    "Sampling",
    "SamplingConfig",
    "SoleraError",
    "StoreConfig",
    "SyncConfig",
    "SyncState",
    "Task",
    "TaskConfig",
    "Term",
    "Tokens",
    "custom_objective",
    "evaluate_models",
    "load",
    "mcp_tools",
    "open_store",
    "resume",
    "train",
]

_MODULES = {
    "run.running": ("train", "resume", "Result"),
    "run.evaluating": ("evaluate_models",),
    "errors": ("SoleraError",),
    "models.classifier": ("Classifier",),
    "evaluate.evaluation": ("Evaluation",),
    "objectives.objective": ("Objective", "custom_objective"),
    "objectives.terms": ("Term",),
    "objectives.tokens": ("Tokens",),
    "protocols": ("Codec", "Generate", "Task"),
    "records": ("Completion", "Prompt", "Reward", "Rollout", "Sampling"),
    "store.ledger": ("Ledger", "open_store"),
    "sync.rules": ("SyncState",),
    "tasks.agent": ("Agent",),
    "tasks.conversation": ("Conversation", "Limits"),
    "tasks.environments": ("EnvironmentTask",),
    "tasks.judge_model": ("Judge",),
    "tasks.mcp_tools": ("mcp_tools",),
}
"""Where the names are that are not in `config`."""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Names load with their first use: torch with `train`, and nothing for the command's help."""
    if name not in __all__:
        raise AttributeError(f"module 'solera' has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "config")
    return getattr(importlib.import_module(f"solera.{module}"), name)
