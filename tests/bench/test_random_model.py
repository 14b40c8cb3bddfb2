"""Random models: their size, their seed, their tokenizer."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from solera.bench import random_model
from solera.models.source import EMBEDDED


def test_the_same_bfloat16_weights_each_time_and_the_tokenizer_of_the_other_model(tmp_path):
    first, second = (random_model.write("tiny", "embedded", tmp_path / name, "cpu") for name in ("first", "second"))
    models = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (first, second)]
    for name, tensor in models[0].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, models[1][name])
    assert models[0]["model.layers.0.mlp.up_proj.weight"].std() > 0
    ours, theirs = AutoTokenizer.from_pretrained(first), AutoTokenizer.from_pretrained(EMBEDDED)
    assert ours.get_vocab() == theirs.get_vocab()
    assert AutoModelForCausalLM.from_pretrained(first).generation_config.eos_token_id == theirs.eos_token_id


def test_the_large_one_has_one_and_a_half_billion_parameters():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, tie_word_embeddings=True, **random_model.SHAPES["1.5b"]))
    by_hand = 24 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + 49152 * 2048 + 2048
    assert sum(p.numel() for p in model.parameters()) == by_hand == 1_560_381_440
