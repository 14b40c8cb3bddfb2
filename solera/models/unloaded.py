"""A model whose weights are still in its files. A process that keeps a part of each weight loads it layer by layer."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from solera.models.adapter import MARK, WRAPPED, Adapter
from solera.models.language_model import with_capped_scores, without_dropout


@dataclass(frozen=True, eq=False)
class Unloaded:
    """`module` has its shapes, but no weights: its parameters are on the device `meta`, except those of adapters."""

    module: PreTrainedModel
    adapter: Adapter | None
    takes_any_mask: bool
    """As `LanguageModel.check` found out."""
    files: dict[str, Path]
    """The file of each parameter, by its name in the files."""

    def fill(self, part: nn.Module) -> None:
        """Load the weights of a part of the module, in float32."""
        names = {parameter: name.replace(WRAPPED, "") for name, parameter in self.module.named_parameters()}
        empty = {parameter for parameter in part.parameters() if parameter.is_meta}
        _exchange(part, empty, lambda parameter: self._read(names[parameter]))

    def _read(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name).float()


def open_unloaded(
    folder: Path, takes_any_mask: bool, adapt: Callable[[PreTrainedModel], Adapter] | None = None
) -> Unloaded | None:
    """`adapt` puts adapters into the model. `None` for a model that has to be loaded whole, because its files name
    weights differently."""
    if not folder.is_dir():
        return None
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    module.tie_weights()
    files = _files(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if any(files.get(name, (None, None))[1] != shape for name, shape in shapes.items()) or not _fill_buffers(module):
        return None
    ready = with_capped_scores(without_dropout(module))
    adapter = _with_stand_ins(ready, adapt) if adapt else None
    return Unloaded(ready.eval(), adapter, takes_any_mask, {name: files[name][0] for name in shapes})


def _with_stand_ins(module: PreTrainedModel, adapt: Callable[[PreTrainedModel], Adapter]) -> Adapter:
    """peft puts adapters on the device of the weights, and would lose their values on `meta`. Meanwhile, each weight is
    a CPU tensor of the right shape that takes no memory."""
    nothing = torch.zeros(())
    _exchange(module, set(module.parameters()), lambda parameter: nothing.expand(parameter.shape))
    adapter = adapt(module)
    base = {parameter for name, parameter in module.named_parameters() if MARK not in name}
    _exchange(module, base, lambda parameter: parameter.detach().to("meta"))
    return adapter


def _exchange(part: nn.Module, old: Set[nn.Parameter], new: Callable[[nn.Parameter], Tensor]) -> None:
    """Give parameters other tensors. A tied one stays one parameter, and a frozen one stays frozen."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # not kept, because it would keep the whole weights
    for owner in part.modules():
        for key, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in old:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(new(parameter), parameter.requires_grad)
            setattr(owner, key, made[parameter])


def _files(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """The file and the shape of each tensor."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: (path, tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    return found


def _fill_buffers(module: PreTrainedModel) -> bool:
    """Make anew what is computed from the config, such as rotary frequencies. False if that is not possible."""
    for owner in list(module.modules()):
        empty = [name for name, buffer in owner.named_buffers(recurse=False) if buffer.is_meta]
        if not empty:
            continue
        if any(True for _ in owner.parameters()):
            return False
        try:
            made = dict(type(owner)(config=module.config.get_text_config()).named_buffers(recurse=False))
        except TypeError:
            return False
        if not made.keys() >= set(empty):
            return False
        for name in empty:
            setattr(owner, name, made[name])
    return True
