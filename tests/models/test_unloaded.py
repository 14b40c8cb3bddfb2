"""A model that is filled layer by layer from its files is the model that transformers loads."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from solera.models.language_model import with_capped_scores
from solera.models.unloaded import open_unloaded
from tests.models.architectures import ARCHITECTURES, VOCABULARY, make

WHOLE = {"qwen3_moe", "gemma2", "gemma3"}
"""Experts have one name each in the files, and together one in the model. Gemma's embedding has a constant beside its
weights that is not in the files."""


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_filled_in_parts_it_computes_what_the_loaded_model_computes(name, tmp_path):
    make(name).save_pretrained(tmp_path)
    unloaded = open_unloaded(tmp_path, takes_any_mask=True)
    assert (unloaded is None) == (name in WHOLE)
    if unloaded is None:
        return
    module = unloaded.module
    assert all(parameter.is_meta for parameter in module.parameters())
    for layer in module.base_model.layers:
        unloaded.fill(layer)
    unloaded.fill(module)
    expected = with_capped_scores(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)).eval()
    ids = torch.arange(2, 14)[None] % VOCABULARY
    assert torch.equal(module(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in expected.named_parameters()]
    assert all(p.requires_grad for p in module.parameters())


def test_adapters_and_hub_names_are_loaded_whole(tmp_path):
    make("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert open_unloaded(tmp_path, takes_any_mask=True) is None
    assert open_unloaded(tmp_path / "owner" / "name", takes_any_mask=True) is None
