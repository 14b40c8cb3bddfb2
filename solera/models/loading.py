"""Load models by folder or hub name, or the embedded one; write them as an ordinary Hugging Face folder."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from solera.config import LoraConfig
from solera.errors import SoleraError, one_line
from solera.folder.files import DIGESTS, DamagedError, check_sealed, seal
from solera.hub import Snapshot
from solera.models.adapter import Adapter, add_adapter, read_adapter
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel, end_token_ids, with_capped_scores, without_dropout
from solera.models.source import ADAPTER, base_of, obtain, places, snapshot_of
from solera.models.unloaded import Unloaded, open_unloaded


def load(path: str, device: torch.device, snapshot: Snapshot | None = None) -> tuple[LanguageModel, TokenizerCodec]:
    """Return the model in float32 on `device`, without dropout, and its codec. With `snapshot`, the weights are those
    files of the hub, whatever it has now."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # the important part of its reports is printed below, in one line
    source, base = places(path, snapshot)
    _refuse_damaged(path, source)
    if base is not None:
        _refuse_damaged(base, base)
    with _reading(path, "its tokenizer (tokenizer.json)"):
        tokenizer = AutoTokenizer.from_pretrained(source)
    with _reading(path, "its config.json or weights"):
        module = AutoModelForCausalLM.from_pretrained(base or source, dtype=torch.float32)
        adapter = read_adapter(module, Path(source)) if base else None
    if len(tokenizer) > module.get_input_embeddings().num_embeddings:
        known = module.get_input_embeddings().num_embeddings
        raise SoleraError(f"model {path}: its tokenizer has {len(tokenizer)} tokens, the model knows {known}")
    model = LanguageModel(with_capped_scores(without_dropout(module)).to(device).eval(), adapter)
    codec = _codec(path, tokenizer, module.generation_config, model.max_length)
    model.check()
    return model, codec


@dataclass(frozen=True)
class Source:
    """Where a model comes from. Every process that loads it gets the same weights."""

    path: str
    """A folder, a hub name, or `embedded`."""
    adapters: LoraConfig | None = None
    """New adapters to add."""
    seed: int = 0
    """Of new adapters."""
    snapshot: Snapshot | None = None
    """The files of the hub's cache that hold the weights, once they are chosen."""

    def load(self, device: torch.device) -> tuple[LanguageModel, TokenizerCodec]:
        model, codec = load(self.path, device, self.snapshot)
        if self.adapters is not None:
            model = with_adapter(model, self.adapters, self.path, self.seed)
        return model, codec

    def for_rank(self, takes_any_mask: bool) -> LanguageModel | Unloaded:
        """The model on a CPU for a process that keeps a part of it. Its weights are left in their files if possible."""
        transformers_logging.disable_progress_bar()
        source, base = places(self.path, self.snapshot)
        adapt: Callable[[PreTrainedModel], Adapter] | None = None
        if base is not None:
            adapt = partial(read_adapter, folder=Path(source))
        elif self.adapters is not None:
            adapt = partial(add_adapter, config=self.adapters, base=self.path, seed=self.seed)
        return open_unloaded(Path(base or source), takes_any_mask, adapt) or self.load(torch.device("cpu"))[0]

    def where(self) -> str:
        """The folder that a process on this machine reads, or the hub name. Of adapters, not of their base model."""
        return places(self.path, self.snapshot)[0]

    def absolute(self) -> "Source":
        """For processes with another working directory."""
        return replace(self, path=os.path.abspath(self.path)) if os.path.isdir(self.path) else self

    def pinned(self) -> "Source":
        """For processes that load it after this one did: they get the same files of the hub, not what it has then."""
        return replace(self, snapshot=snapshot_of(self.path))


JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json", "model.safetensors.index.json", ADAPTER,
)  # fmt: skip
"""Files of a model folder that hold one JSON object. transformers does not notice every damaged one: if it cannot read
generation_config.json, it continues with other end tokens."""


def _refuse_damaged(path: str, source: str) -> None:
    """Refuse a model folder with a damaged file, and name the file. If the folder has digests, check them first."""
    folder = Path(source)
    try:
        check_sealed(folder)
    except DamagedError as error:
        raise DamagedError(f"model {path}: {error} (if you changed it yourself, remove {DIGESTS})") from error
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            _read_through(file)
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise SoleraError(f"model {path}: {file.name} is damaged: {one_line(error)}") from error


def _read_through(file: Path) -> None:
    if file.name in JSON_FILES and not isinstance(json.loads(file.read_bytes()), dict):
        raise ValueError("not a JSON object")
    if file.suffix == ".jinja":
        file.read_text(encoding="utf-8")
    if file.suffix == ".safetensors":
        with safe_open(file, "pt"):
            pass


@contextmanager
def _reading(path: str, part: str) -> Iterator[None]:
    """Turn any error of another package's reader into a one-line error. tokenizers raises a bare Exception."""
    try:
        yield
    except SoleraError:
        raise
    except Exception as error:
        raise SoleraError(f"model {path}: {part} cannot be loaded: {one_line(error)}") from error


def with_adapter(model: LanguageModel, config: LoraConfig, path: str, seed: int) -> LanguageModel:
    """Return the same weights with new LoRA adapters. `path` is where the weights came from."""
    if model.adapter is not None:
        raise SoleraError(f'model {path}: holds adapters only; begin from a model written with lora.export = "merged"')
    base = os.path.abspath(path) if os.path.isdir(path) else path
    adapter = add_adapter(model.module, config, base, seed)
    adapted = LanguageModel(adapter.module.eval(), adapter)
    adapted.takes_any_mask, adapted.can_take_plans = model.takes_any_mask, model.can_take_plans
    return adapted


@dataclass(frozen=True)
class Reader:
    """A model's codec without its weights, its vocabulary size and the length of its context."""

    codec: TokenizerCodec
    vocabulary: int
    max_length: int | None


def load_reader(path: str) -> Reader:
    """Load what is needed to turn text into tokens for the model."""
    source = obtain(path)
    _refuse_damaged(path, source)
    with _reading(path, "its tokenizer (tokenizer.json)"):
        tokenizer = AutoTokenizer.from_pretrained(source)
    source = base_of(source) or source
    with _reading(path, "its config.json"):
        config = AutoConfig.from_pretrained(source).get_text_config()
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # a folder need not have one
        generation = GenerationConfig.from_model_config(config)
    max_length = getattr(config, "max_position_embeddings", None)
    return Reader(_codec(path, tokenizer, generation, max_length), config.vocab_size, max_length)


def _codec(path: str, tokenizer: Any, generation_config: Any, max_length: int | None) -> TokenizerCodec:
    ends = end_token_ids(generation_config, tokenizer)
    if not ends:
        raise SoleraError(f"model {path}: neither its tokenizer nor its generation config names an end token (eos)")
    return TokenizerCodec(tokenizer, ends, max_length)


def save(model: LanguageModel, codec: TokenizerCodec, folder: Path) -> None:
    """Write a Hugging Face folder with digests. For a model with adapters, write only these."""
    try:
        (model.adapter or model.module).save_pretrained(folder)
        codec.tokenizer.save_pretrained(folder)
        seal(folder)
    except SafetensorError as error:  # includes a full disk
        raise OSError(errno.EIO, one_line(error), str(folder)) from error


def save_without_weights(model: LanguageModel, codec: TokenizerCodec, folder: Path) -> None:
    """Write everything else of a Hugging Face folder, and the digests of all of it. The weights are there already."""
    module = model.module
    module.config.dtype = str(module.dtype).removeprefix("torch.")
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    seal(folder)


def export(model: LanguageModel, codec: TokenizerCodec, folder: Path, merge: bool) -> None:
    """Write the final model of a run. With `merge`, adapters are added into the weights."""
    save(LanguageModel(model.adapter.merged()) if merge and model.adapter else model, codec, folder)
