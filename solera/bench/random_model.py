"""A Llama of a given size with random weights, to measure how time grows with the size of a model."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from solera.bench.options import Size
from solera.models.source import obtain

SHAPES: dict[Size, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "1.5b": {
        "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip


def write(size: Size, tokenizer_of: str, folder: Path, device: str) -> str:
    """Write a Hugging Face folder: bfloat16, seeded, tied embeddings, and the tokenizer of another model.

    Weights are drawn on `device`. On one CPU core, a billion and a half take a minute.
    """
    tokenizer = AutoTokenizer.from_pretrained(obtain(tokenizer_of))
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=32_768, tie_word_embeddings=True, **SHAPES[size],
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)  # float32 would need twice the memory
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="1GB")
    tokenizer.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return str(folder)
