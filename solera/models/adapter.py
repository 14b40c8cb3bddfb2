"""LoRA adapters: W + (alpha / rank)·B·A in place of W, with A and B trained and everything else left as it is.

The one file that names the package peft.
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
"""In the name of every parameter of an adapter."""


class Adapter:
    """The adapters that were put into a model's layers."""

    def __init__(self, peft_model: Any) -> None:
        self._peft = peft_model
        self.module: PreTrainedModel = peft_model.get_base_model()

    def save_pretrained(self, folder: Path) -> None:
        self._peft.save_pretrained(folder, save_embedding_layers=False)  # "auto" would look for the base on the hub

    def merged(self) -> PreTrainedModel:
        """A copy of the model with the adapters added into its weights; A, B and W stay as they are."""
        return copy.deepcopy(self._peft).merge_and_unload()


def add_adapter(module: PreTrainedModel, config: LoraConfig, base: str, seed: int) -> Adapter:
    """Put fresh adapters into the layers of `module`: B = 0, A by the seed, so that the model is as it was."""
    peft = need_peft()
    everything = config.targets == ("all-linear",)
    wanted = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules="all-linear" if everything else list(config.targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    module.name_or_path = base  # peft writes it into the adapters' config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return Adapter(peft.get_peft_model(module, wanted, autocast_adapter_dtype=False))
        except ValueError as error:
            raise SoleraError(f"lora.targets: {one_line(error)}") from error


def read_adapter(module: PreTrainedModel, folder: Path) -> Adapter:
    """Put the adapters that a folder holds into the layers of `module`."""
    peft = need_peft()
    return Adapter(peft.PeftModel.from_pretrained(module, folder, is_trainable=True, autocast_adapter_dtype=False))


@contextmanager
def switched_off(module: PreTrainedModel) -> Iterator[None]:
    """The model as it was before it had adapters."""
    layers = [part for part in module.modules() if isinstance(part, need_peft().tuners.tuners_utils.BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
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
