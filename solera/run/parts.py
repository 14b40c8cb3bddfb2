"""Loads and checks what a run is built from (model, task, data type) before anything is written."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from solera import config as configuration
from solera.config import Config
from solera.errors import SoleraError
from solera.folder.checkpoint import Checkpoint, UnreadableCheckpointError
from solera.folder.files import DamagedError
from solera.models.codec import TokenizerCodec
from solera.models.extent import fits_float16, largest
from solera.models.language_model import LanguageModel
from solera.models.loading import Source
from solera.objectives.objective import Objective, compose
from solera.objectives.table import resolve_config
from solera.protocols import Task
from solera.run.own_code import NO_OWN_CODE, OwnCode
from solera.run.task import build_task

EXTENT_PROMPTS = 8
"""Number of held-out prompts used to measure how large the model's activations get."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What `build_loop` and `build_exam` start from."""

    config: Config
    """Resolved."""
    model: LanguageModel
    codec: TokenizerCodec
    task: Task
    compute: torch.dtype
    own: OwnCode = NO_OWN_CODE
    say: Callable[[str], None] = lambda sentence: None
    """Prints a note for the user."""
    source: Source | None = None
    """Where the model was loaded from, for other processes that need it."""
    others_on: torch.device | None = None
    """Where ranks and engines in other processes compute, if that is not where the model is."""

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        return self.others_on or self.model.device

    @property
    def objective(self) -> Objective:
        return self.own.objective or compose(self.config.objective)


def load_parts(
    config: Config,
    own: OwnCode = NO_OWN_CODE,
    say: Callable[[str], None] = lambda sentence: None,
    checkpoint: Checkpoint | None = None,
) -> Parts:
    """Load the model of a resolved config, or of the checkpoint, and build its task. If ranks and engines are in other
    processes, no GPU is used for this process's copy, which may be larger than one."""
    source, device = source_of(config, checkpoint), device_of(config)
    alone = not (config.cluster.learners and config.cluster.engines)
    model, codec = _load_model(source, device if alone else torch.device("cpu"), checkpoint)
    if model.plain_because:
        say(f"{type(model.module).__name__}: {model.plain_because}, so texts are padded, not packed, which is slower")
    task = build_task(config, codec, model.max_length, own.rewards, own.task)
    if config.learn.memory == "lean":
        return Parts(config, model.in_bfloat16(), codec, task, torch.bfloat16, own, say, source, device)
    compute = compute_of(config, model, device, task, say, checkpoint.state.compute if checkpoint else None)
    return Parts(config, model, codec, task, compute, own, say, source, device)


def resolved(config: Config, own: OwnCode = NO_OWN_CODE) -> Config:
    """Check every value, fill in unset fields, and choose a name for the run."""
    config = resolve_config(config)
    if config.run.name is None:
        objective = "own-objective" if own.objective else config.objective.name
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{objective}-s{config.run.seed}"
        taken = (Path(config.run.root) / name).exists()
        config = configuration.override(config, "run", name=f"{name}-{uuid.uuid4().hex[:4]}" if taken else name)
    return config


def source_of(config: Config, checkpoint: Checkpoint | None) -> Source:
    """The model of the checkpoint, or the model that the run begins with."""
    if checkpoint is not None:
        return Source(str(checkpoint.model))
    return Source(config.model.path, config.lora if config.lora.rank else None, config.run.seed)


def _load_model(
    source: Source, device: torch.device, checkpoint: Checkpoint | None
) -> tuple[LanguageModel, TokenizerCodec]:
    try:
        return source.load(device)
    except SoleraError as error:
        if checkpoint is None:
            raise
        if checkpoint.sealed and not isinstance(error, DamagedError):  # a base model or a package that is missing
            raise SoleraError(f"{checkpoint.folder}: {error}") from error
        raise UnreadableCheckpointError(checkpoint.folder, str(error)) from error


def device_of(config: Config) -> torch.device:
    available = torch.cuda.is_available()
    if config.run.device == "cuda" and not available:
        raise SoleraError("run.device is cuda, but torch finds no GPU here: use cpu or auto")
    device = torch.device("cuda" if available and config.run.device != "cpu" else "cpu")
    if device.type == "cpu":
        configuration.refuse_without_gpu(config)
    return device


def compute_of(
    config: Config,
    model: LanguageModel,
    device: torch.device,
    task: Task,
    say: Callable[[str], None] = lambda sentence: None,
    begun: str | None = None,
) -> torch.dtype:
    """The data type for `model.compute` on this device. On a GPU, `auto` takes the type that the run has `begun` with.
    If there is none, it takes float16 if the model's activations on a few prompts fit into it, else bfloat16."""
    if config.model.compute != "auto":
        if config.model.compute == "float16" and model.has_experts:
            raise SoleraError("model.compute is float16, but a mixture of experts needs bfloat16 or float32")
        return getattr(torch, config.model.compute)
    if device.type == "cpu":
        return torch.float32
    if begun is not None:
        say(f"using {begun}, as at the start of the run")
        return getattr(torch, begun)
    # Ranks have no copy of their weights in float16.
    if not model.can_take_plans or model.has_experts or config.cluster.learners:
        return torch.bfloat16
    number = largest(model, [prompt.token_ids for prompt in task.held_out(EXTENT_PROMPTS)])
    if fits_float16(number):
        say(f"using float16: the model's activations reach {number:,.0f} of its 65,504")
        return torch.float16
    say(f"using bfloat16: the model's activations reach {number:,.0f}, too close to float16's maximum")
    return torch.bfloat16
