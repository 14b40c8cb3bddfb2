"""Small models get torch settings of their own."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.config import LoraConfig, RunConfig
from solera.models.language_model import LanguageModel
from solera.models.loading import with_adapter
from solera.run.process import torch_for


def llama(vocabulary: int) -> LanguageModel:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return LanguageModel(LlamaForCausalLM(config))


def settings(model: LanguageModel) -> tuple[int, bool]:
    with torch.backends.mkldnn.flags(enabled=True), torch_for(model, RunConfig()):
        return torch.get_num_threads(), torch.backends.mkldnn.enabled


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_only_a_small_model_is_computed_with_one_thread_and_without_onednn():
    assert settings(llama(100)) == (1, False)
    assert settings(llama(50_000)) == (2, True)


def test_a_large_model_with_small_adapters_is_not_small():
    pytest.importorskip("peft")
    model = with_adapter(llama(50_000), LoraConfig(rank=2), "large", seed=0)
    assert sum(parameter.numel() for parameter in model.parameters().values()) < 10_000
    assert settings(model) == (2, True)
