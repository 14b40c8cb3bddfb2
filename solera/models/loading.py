"""Models by folder, by hub name, or the one inside the package; and writing them back as an ordinary folder."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from solera.errors import SoleraError
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel, end_token_ids, without_dropout

EMBEDDED = Path(__file__).parent / "embedded"


def load(path: str, device: torch.device) -> tuple[LanguageModel, TokenizerCodec]:
    """The model in float32 on `device`, dropout off, and its codec."""
    transformers_logging.disable_progress_bar()
    source = _source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        module = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SoleraError(f"model {path}: cannot be loaded: {_first_line(error)}") from error
    ends = end_token_ids(module, tokenizer)
    if not ends:
        raise SoleraError(f"model {path}: neither its tokenizer nor its generation config names an end token (eos)")
    model = LanguageModel(without_dropout(module).to(device).eval())
    model.check()
    return model, TokenizerCodec(tokenizer, ends)


def save(model: LanguageModel, codec: TokenizerCodec, folder: Path) -> None:
    """Write an ordinary Hugging Face folder."""
    model.module.save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)


def _source(path: str) -> str:
    if path == "embedded":
        return str(EMBEDDED)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SoleraError(f"model {path}: the folder has no config.json, so it is not a Hugging Face model")
        return str(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise SoleraError(f"model {path}: no such folder, and not a hub name of the form owner/name")
    return path


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
