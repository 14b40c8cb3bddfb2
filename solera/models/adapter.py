"""LoRA adapters: replace W by W + (alpha / rank)·B·A. Only A and B are trained.

This is the only file that imports the package peft.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from solera.config import LoraConfig
from solera.errors import SoleraError, one_line

MARK = "lora_"
"""Part of the name of every adapter parameter."""


class Adapter:
    """The adapters in a model's layers."""

    def __init__(self, peft_model: Any) -> None:
        self._peft = peft_model
        self.module: PreTrainedModel = peft_model.get_base_model()

    def save_pretrained(self, folder: Path) -> None:
        self._peft.save_pretrained(folder, save_embedding_layers=False)  # "auto" would look for the base on the hub

    def merged(self) -> PreTrainedModel:
        """Return a copy of the model with the adapters added into its weights. A, B and W stay unchanged."""
        return copy.deepcopy(self._peft).merge_and_unload()


def add_adapter(module: PreTrainedModel, config: LoraConfig, base: str, seed: int) -> Adapter:
    """Put new adapters into the layers of `module`. B is 0 and A is seeded, so the model's output does not change."""
    peft = need_peft()
    everything = config.targets == ("all-linear",)
    wanted = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules="all-linear" if everything else list(config.targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    module.name_or_path = base  # peft writes it into the config of the adapters
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return Adapter(peft.get_peft_model(module, wanted, autocast_adapter_dtype=False))
        except ValueError as error:
            raise SoleraError(f"lora.targets: {one_line(error)}") from error


def read_adapter(module: PreTrainedModel, folder: Path) -> Adapter:
    """Load the adapters of a folder into the layers of `module`."""
    peft = need_peft()
    return Adapter(peft.PeftModel.from_pretrained(module, folder, is_trainable=True, autocast_adapter_dtype=False))


@contextmanager
def switched_off(module: PreTrainedModel) -> Iterator[None]:
    """Switch the model's adapters off while the context is active."""
    layers = [part for part in module.modules() if isinstance(part, need_peft().tuners.tuners_utils.BaseTunerLayer)]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trained:  # peft would freeze them, and a sharded model keeps what it sees at its first pass
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def need_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise SoleraError("LoRA needs the package peft: pip install 'solera[lora]'") from None
    return peft
