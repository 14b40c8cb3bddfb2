"""What a run is: frozen dataclasses, one for each room, every default stated once.

A run is described by a TOML file with one table for each class of `rooms`, and by command-line overrides of the same
names (`--learn.lr 1e-4`). The string under a field is its help text. Nothing here imports torch.
"""

from solera.config.fields import LARGEST, Text, check_types, help_of, perhaps
from solera.config.objective import AdvantageName, AggregationName, ClipName, KLName, ObjectiveConfig
from solera.config.reading import Place, dump, load, located, overlay, override, parse, places, read_toml, typed_fields
from solera.config.rooms import (
    CheckpointConfig,
    CollectConfig,
    Config,
    DiagnoseConfig,
    DivergenceName,
    DrawConfig,
    EngineConfig,
    EvaluateConfig,
    LearnConfig,
    LoraConfig,
    ModelConfig,
    OrderName,
    ReportConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    StoreConfig,
    SyncConfig,
    TaskConfig,
    shares_of,
    writes,
)
from solera.config.rules import check, new_folder
from solera.config.tasks import GYM, kind_of_task, resolve_task, task_parts

__all__ = [
    "GYM",
    "LARGEST",
    "AdvantageName",
    "AggregationName",
    "CheckpointConfig",
    "ClipName",
    "CollectConfig",
    "Config",
    "DiagnoseConfig",
    "DivergenceName",
    "DrawConfig",
    "EngineConfig",
    "EvaluateConfig",
    "KLName",
    "LearnConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OrderName",
    "Place",
    "ReportConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "StoreConfig",
    "SyncConfig",
    "TaskConfig",
    "Text",
    "check",
    "check_types",
    "dump",
    "help_of",
    "kind_of_task",
    "load",
    "located",
    "new_folder",
    "overlay",
    "override",
    "parse",
    "perhaps",
    "places",
    "read_toml",
    "resolve_task",
    "shares_of",
    "task_parts",
    "typed_fields",
    "writes",
]
