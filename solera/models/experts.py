"""Mixtures of experts: files have tensors for each expert, and models have one parameter for all experts of a layer."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

Found = Mapping[str, tuple[Path, tuple[int, ...]]]
"""The file and the shape of each tensor."""
Experts = tuple[tuple[str, ...], ...]
"""For each expert, the tensors whose rows follow each other in its part of the parameter."""


def experts_in(module: PreTrainedModel, files: Found) -> dict[str, Experts]:
    """The parameters that are stacks of tensors in the files, as transformers says for this kind of model. Parameters
    that it would make in another way are not among them."""
    joining = [
        (change.target_patterns[0], change.source_patterns)
        for change in get_checkpoint_conversion_mapping(module.config.model_type) or ()
        if isinstance(change, WeightConverter) and _stacks(change)
    ]
    found: dict[str, Experts] = {}
    for name, parameter in module.named_parameters():
        for target, sources in joining:
            if name not in files and name.endswith(f".{target}"):
                before = name.removesuffix(target)
                experts = tuple(
                    tuple(before + source.replace("*", str(number)) for source in sources)
                    for number in range(len(parameter))
                )
                if all(_fits(expert, tuple(parameter.shape[1:]), files) for expert in experts):
                    found[name] = experts
    return found


def _stacks(change: WeightConverter) -> bool:
    """Whether it puts experts one after the other, and each expert's tensors below each other."""
    first, *others = change.operations
    below = [isinstance(one, Concatenate) and one.dim == 1 for one in others]
    stacked = isinstance(first, MergeModulelist) and first.dim == 0
    return stacked and below == [True] * (len(change.source_patterns) > 1) and len(change.target_patterns) == 1


def _fits(names: tuple[str, ...], shape: tuple[int, ...], files: Found) -> bool:
    shapes = [files[name][1] for name in names if name in files]
    rows = sum(one[0] for one in shapes)
    return len(shapes) == len(names) and all(one[1:] == shape[1:] for one in shapes) and rows == shape[0]
