"""A model that is filled layer by layer from its files is the model that transformers loads."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from solera.config import LoraConfig
from solera.models.adapter import add_adapter, read_adapter
from solera.models.language_model import with_capped_scores
from solera.models.unloaded import open_unloaded
from tests.models.architectures import ARCHITECTURES, HEAD, SIZES, TYPES, VOCABULARY, make


def load_whole(folder: Path) -> PreTrainedModel:
    return with_capped_scores(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_filled_in_parts_it_computes_what_the_loaded_model_computes(name, tmp_path):
    make(name).save_pretrained(tmp_path)
    unloaded = open_unloaded(tmp_path, takes_any_mask=True)
    assert unloaded.named_as_files == (name != "qwen3_moe")  # experts have one name each in the files
    module = unloaded.module
    assert all(parameter.is_meta for parameter in module.parameters())
    for layer in module.base_model.layers:
        unloaded.fill(layer)
    unloaded.fill(module)
    expected = load_whole(tmp_path)
    ids = torch.arange(2, 14)[None] % VOCABULARY
    assert torch.equal(module(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in expected.named_parameters()]
    assert all(p.requires_grad for p in module.parameters())
    buffers, same = dict(module.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == same.keys() and all(torch.equal(buffers[n], b) for n, b in same.items())
    assert all(buffers[n].dtype == b.dtype for n, b in same.items())


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head")], ids=str)
def test_adapters_have_the_values_of_a_loaded_model(name, targets, tmp_path):
    """New ones, and those of a folder. The base stays in its files."""
    if name == "phi3" and targets != ("all-linear",):
        targets = ("qkv_proj", "lm_head")
    whole = make(name).float()
    whole.save_pretrained(tmp_path / "base")
    added = partial(add_adapter, config=LoraConfig(rank=2, targets=targets), base=str(tmp_path / "base"), seed=7)
    expected = added(load_whole(tmp_path / "base"))
    before = torch.get_rng_state()
    check_filled(open_unloaded(tmp_path / "base", True, added), expected)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    for key, parameter in expected.module.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter)
    expected.save_pretrained(tmp_path / "adapters")
    read = partial(read_adapter, folder=tmp_path / "adapters")
    check_filled(open_unloaded(tmp_path / "base", True, read), read(load_whole(tmp_path / "base")))


@torch.no_grad()
def check_filled(unloaded, expected):
    module = unloaded.module
    assert unloaded.adapter.module is module and not any(part.training for part in module.modules())
    for key, parameter in module.named_parameters():
        assert parameter.is_meta == ("lora_" not in key), key
    for layer in module.base_model.layers:
        unloaded.fill(layer)
    unloaded.fill(module)
    found, wanted = dict(module.named_parameters()), dict(expected.module.named_parameters())
    assert list(found) == list(wanted)
    for key, parameter in found.items():
        assert torch.equal(parameter, wanted[key]) and parameter.requires_grad == wanted[key].requires_grad, key
    ids = torch.arange(2, 14)[None] % VOCABULARY
    assert torch.equal(module(input_ids=ids).logits, expected.module.eval()(input_ids=ids).logits)


MIXTURES = {
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_stacked_as_transformers_stacks_them(name, tmp_path):
    """Mixtral's files have yet other names, so it is loaded whole. 16 rows of 32 columns twice make a square."""
    torch.manual_seed(0)
    MIXTURES[name]().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2  # experts of a layer are in several files
    unloaded = open_unloaded(tmp_path, takes_any_mask=True)
    assert (unloaded is None) == (name == "mixtral")
    if unloaded is not None:
        unloaded.fill(unloaded.module)
        found, expected = dict(unloaded.module.named_parameters()), dict(load_whole(tmp_path).named_parameters())
        assert list(found) == list(expected) and any(parameter.dim() == 3 for parameter in found.values())
        assert all(torch.equal(parameter, expected[key]) for key, parameter in found.items())
        assert all(parameter.dtype == torch.float32 for parameter in found.values())


def test_a_missing_expert_is_noticed(tmp_path):
    make("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_unloaded(tmp_path, takes_any_mask=True) is None


def test_a_model_with_buffers_in_its_files_is_loaded_whole(tmp_path):
    """Gemma 4 has a number in each layer that is not trained, but not computed from the config either."""
    small = {**SIZES, **HEAD, **TYPES, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    Gemma4ForCausalLM(Gemma4TextConfig(**small)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.layer_scalar" in file.keys()  # noqa: SIM118
    assert open_unloaded(tmp_path, takes_any_mask=True) is None


def test_a_name_without_files_is_not_opened(tmp_path):
    assert open_unloaded(tmp_path / "owner" / "name", takes_any_mask=True) is None
