"""A model whose weights are still in its files. A process that keeps a part of each weight loads it layer by layer."""

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from solera.models.adapter import MARK, WRAPPED, Adapter
from solera.models.experts import Experts, experts_in
from solera.models.language_model import with_capped_scores, without_dropout


@dataclass(frozen=True, eq=False)
class Unloaded:
    """`module` has its shapes, but no weights: its parameters are on the device `meta`, except those of adapters."""

    module: PreTrainedModel
    adapter: Adapter | None
    takes_any_mask: bool
    """As `LanguageModel.check` found out."""
    files: dict[str, Path]
    """The file of each tensor."""
    experts: dict[str, Experts]
    """The tensors of parameters that are not one tensor in the files."""

    @property
    def named_as_files(self) -> bool:
        return self.adapter is None and not self.experts

    def fill(self, part: nn.Module) -> None:
        """Load the weights of a part of the module, in float32."""
        names = {parameter: name.replace(WRAPPED, "") for name, parameter in self.module.named_parameters()}
        empty = {parameter for parameter in part.parameters() if parameter.is_meta}
        _exchange(part, empty, lambda parameter: self._read(names[parameter]))

    def _read(self, name: str) -> Tensor:
        experts = self.experts.get(name, ((name,),))
        with ExitStack() as stack:
            paths = {self.files[tensor] for expert in experts for tensor in expert}
            opened = {path: stack.enter_context(safe_open(path, "pt")) for path in paths}

            def read(tensor: str) -> Tensor:
                return opened[self.files[tensor]].get_tensor(tensor).float()

            if name not in self.experts:
                return read(name)
            first = torch.cat([read(tensor) for tensor in experts[0]])
            whole = first.new_empty(len(experts), *first.shape)
            for number, expert in enumerate(experts):
                torch.cat([read(tensor) for tensor in expert], out=whole[number])
            return whole


def open_unloaded(
    folder: Path, takes_any_mask: bool, adapt: Callable[[PreTrainedModel], Adapter] | None = None
) -> Unloaded | None:
    """`adapt` puts adapters into the model. `None` for a model that has to be loaded whole: its files name weights
    differently, or hold more than its parameters."""
    if not folder.is_dir():
        return None
    with _without_weights():
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    module.tie_weights()
    files = _files(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    experts = experts_in(module, files)
    known = all(name in experts or files.get(name, (None, None))[1] == shape for name, shape in shapes.items())
    if not known or _has_other_weights(module):
        return None
    ready = with_capped_scores(without_dropout(module))
    adapter = _with_stand_ins(ready, adapt) if adapt else None
    return Unloaded(ready.eval(), adapter, takes_any_mask, {name: path for name, (path, _) in files.items()}, experts)


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


@contextmanager
def _without_weights() -> Iterator[None]:
    """Put the parameters of new modules on `meta`. What is computed from the config, such as rotary frequencies, is
    kept. A linear layer's memory is reserved for a moment, but never written."""

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied one must stay the same object
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]  # torch's type is too narrow
    try:
        yield
    finally:
        hook.remove()


def _has_other_weights(module: PreTrainedModel) -> bool:
    """Whether there are buffers in its files."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return bool(module.state_dict().keys() - parameters.keys())
