"""Writes a model that is divided among ranks as a Hugging Face folder. Nobody holds the whole model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from solera.errors import SoleraError, one_line
from solera.learner.portions import balance
from solera.models.language_model import LanguageModel

INDEX = "model.safetensors.index.json"


class Share(NamedTuple):
    """The file that a rank wrote."""

    file: str
    names: tuple[str, ...]
    size: int
    """Bytes of its tensors."""


@torch.no_grad()
def write_share(model: LanguageModel, rank: int, count: int, folder: Path) -> Share:
    """Gather one tensor after the other, and write those that are this rank's: whole tensors, and of all tensors about
    as many bytes as every other rank."""
    parameters = model.parameters()
    owners = balance([parameter.numel() for parameter in parameters.values()], count)
    kept = {}
    for (name, parameter), owner in zip(parameters.items(), owners, strict=True):
        whole = model.whole(parameter.detach())
        if owner == rank:
            kept[name] = whole.contiguous().cpu()
    file = folder / f"model-{rank + 1:05d}-of-{count:05d}.safetensors"
    try:
        save_file(kept, file, {"format": "pt"})
    except SafetensorError as error:  # includes a full disk
        raise SoleraError(f"{file}: {one_line(error)}") from error
    return Share(file.name, tuple(kept), sum(tensor.nbytes for tensor in kept.values()))


def write_index(shares: Sequence[Share], folder: Path) -> None:
    """Say which file holds which tensor."""
    places = {name: share.file for share in shares for name in share.names}
    index = {
        "metadata": {"total_size": sum(share.size for share in shares)},
        "weight_map": dict(sorted(places.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
