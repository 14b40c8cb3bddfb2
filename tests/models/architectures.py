"""Tiny random models of the architectures that people train, with the features that make them differ.

Windows, caps and routers are small enough that every text in the tests is affected by them.
"""

from collections.abc import Callable

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, END, WINDOW = 20, 1, 4
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.3,
    "eos_token_id": END, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
HEAD = {"head_dim": 16}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEAD)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEAD, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2, window": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **TYPES, use_sliding_window=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEAD)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, **HEAD, sliding_window=None)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SIZES, **HEAD, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES, **HEAD, **TYPES, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=16
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEAD, **TYPES, query_pre_attn_scalar=16)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES, partial_rotary_factor=0.5)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, sliding_window=WINDOW)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, **HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
        )
    ),
}


def make(name: str) -> PreTrainedModel:
    """A model in float64, if transformers can compute it so: experts cannot, nor eager attention over padded texts."""
    torch.manual_seed(0)
    module = ARCHITECTURES[name]().eval()
    return module if name in ("qwen3_moe", "gemma2") else module.double()
