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
from solera.models.merging import WEIGHT, Base

MARK = "lora_"
"""Part of the name of every adapter parameter."""
WRAPPED = ".base_layer"
"""What peft adds to the name of a layer that has adapters."""


class Adapter:
    """The adapters in a model's layers."""

    def __init__(self, peft_model: Any) -> None:
        self._peft = peft_model
        self.module: PreTrainedModel = peft_model.get_base_model()

    def save_pretrained(self, folder: Path) -> None:
        self._peft.save_pretrained(folder, save_embedding_layers=False)  # "auto" would look for the base on the hub

    def merged(self) -> PreTrainedModel:
        """Return a copy of the model with the adapters added into its weights. A, B and W stay unchanged.

        16-bit weights become float32, which can hold the sum. Most of what LoRA adds is smaller than the distance of
        two numbers in bfloat16.
        """
        merged = copy.deepcopy(self._peft)
        return (merged.float() if self.module.dtype.itemsize < 4 else merged).merge_and_unload()

    def base(self, dtype: torch.dtype) -> Base:
        """The frozen weights, cast to `dtype`. Refuses adapters that are not of the form W + s·B·A, where W is the
        weight of one linear layer."""
        named = {name: p.detach() for name, p in self.module.named_parameters() if MARK not in name}
        lora, scale = need_peft().tuners.lora, dict[str, float]()
        for name, layer in self.module.named_modules():
            if not isinstance(layer, lora.LoraLayer):
                continue
            plain = isinstance(layer, lora.Linear) and not layer.fan_in_fan_out and list(layer.scaling) == ["default"]
            own = name + WRAPPED + WEIGHT in named  # not the one of the embedding
            if not plain or not own or layer.lora_variant or layer.lora_bias["default"]:
                raise SoleraError(
                    f"lora.targets: the adapters of {name} cannot be sent to a server: only plain adapters of linear "
                    "layers can, and only if no other layer has the same weights"
                )
            scale[name] = float(layer.scaling["default"])
        return Base({name.replace(WRAPPED, ""): tensor.to(dtype) for name, tensor in named.items()}, scale)


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
