"""Models by folder, by hub name, or the one inside the package; and writing them back as an ordinary folder."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from solera.config import LoraConfig
from solera.errors import SoleraError, one_line
from solera.models.adapter import add_adapter, read_adapter
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel, end_token_ids, without_dropout
from solera.models.source import base_of, obtain


def load(path: str, device: torch.device) -> tuple[LanguageModel, TokenizerCodec]:
    """The model in float32 on `device`, dropout off, and its codec."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # what matters of its reports is said below, in one line
    source = obtain(path)
    base = base_of(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        module = AutoModelForCausalLM.from_pretrained(base or source, dtype=torch.float32)
        adapter = read_adapter(module, Path(source)) if base else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise SoleraError(f"model {path}: cannot be loaded: {one_line(error)}") from error
    if len(tokenizer) > module.get_input_embeddings().num_embeddings:
        known = module.get_input_embeddings().num_embeddings
        raise SoleraError(f"model {path}: its tokenizer has {len(tokenizer)} tokens, the model knows {known}")
    model = LanguageModel(without_dropout(module).to(device).eval(), adapter)
    codec = _codec(path, tokenizer, module.generation_config, model.max_length)
    model.check()
    return model, codec


def with_adapter(model: LanguageModel, config: LoraConfig, path: str, seed: int) -> LanguageModel:
    """The same weights with fresh LoRA adapters in them; `path` is where the weights came from."""
    if model.adapter is not None:
        raise SoleraError(f'model {path}: holds adapters only; begin from a model written with lora.export = "merged"')
    base = os.path.abspath(path) if os.path.isdir(path) else path
    adapter = add_adapter(model.module, config, base, seed)
    adapted = LanguageModel(adapter.module.eval(), adapter)
    adapted.takes_any_mask, adapted.can_take_plans = model.takes_any_mask, model.can_take_plans
    return adapted


@dataclass(frozen=True)
class Reader:
    """A model's codec without its weights, and what the model can take."""

    codec: TokenizerCodec
    vocabulary: int
    max_length: int | None


def load_reader(path: str) -> Reader:
    """All that is needed to turn text into what the model would learn from."""
    source = obtain(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        source = base_of(source) or source
        config = AutoConfig.from_pretrained(source).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise SoleraError(f"model {path}: cannot be loaded: {one_line(error)}") from error
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
    """Write an ordinary Hugging Face folder; of a model with adapters, these alone."""
    try:
        (model.adapter or model.module).save_pretrained(folder)
        codec.tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # a full disk, too
        raise OSError(errno.EIO, one_line(error), str(folder)) from error


def export(model: LanguageModel, codec: TokenizerCodec, folder: Path, merge: bool) -> None:
    """Write what a run leaves behind: with `merge`, adapters are added into the weights."""
    save(LanguageModel(model.adapter.merged()) if merge and model.adapter else model, codec, folder)
