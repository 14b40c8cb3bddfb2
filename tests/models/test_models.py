"""Models by folder, name, or the one inside the package."""

import json
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from solera.errors import SoleraError
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.models.source import EMBEDDED

CPU = torch.device("cpu")


def test_the_embedded_model_is_an_ordinary_small_folder_that_vllm_can_serve():
    files = list(EMBEDDED.iterdir())
    assert sum(file.stat().st_size for file in files) <= 3_000_000
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file.name for file in files}
    config = json.loads((EMBEDDED / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] in (32, 64)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    assert tokenizer.decode(tokenizer("37+45=")["input_ids"]) == "37+45="
    assert model.config.vocab_size == len(tokenizer)


def test_a_saved_model_loads_again_with_the_same_weights(tmp_path):
    model, codec = loading.load("embedded", CPU)
    loading.save(model, codec, tmp_path / "copy")
    again, _ = loading.load(str(tmp_path / "copy"), CPU)
    for name, parameter in model.parameters().items():
        assert torch.equal(parameter, again.parameters()[name])


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(SoleraError, match=r"no config\.json"):
        loading.load(str(tmp_path), CPU)
    with pytest.raises(SoleraError, match="no such folder"):
        loading.load("nowhere", CPU)
    shutil.copytree(EMBEDDED, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(SoleraError, match=r"model\.safetensors is damaged") as refusal:
        loading.load(str(tmp_path / "broken"), CPU)
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_larger_than_its_model_is_refused(tmp_path):
    shutil.copytree(EMBEDDED, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    model.resize_token_embeddings(5)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(SoleraError, match="its tokenizer has 17 tokens, the model knows 5"):
        loading.load(str(tmp_path / "model"), CPU)


def test_a_copy_rounds_weights_but_not_rotary_frequencies(tiny):
    copy = tiny.copy(torch.bfloat16)
    assert {p.dtype for p in copy.parameters().values()} == {torch.bfloat16}
    before, after = (dict(m.module.named_buffers()) for m in (tiny, copy))
    assert before
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def test_a_model_with_eager_attention_gets_no_boolean_mask(tiny):
    """Eager attention would add it to the scores. Ragged prompts must still be continued right."""
    from tests.engines.test_in_process import SAMPLING, InProcessEngine, ask, fresh_logp, ragged_requests

    module = tiny.copy(torch.float32).module
    module.set_attn_implementation("eager")
    model = LanguageModel(module)
    model.check()
    assert not model.takes_any_mask
    requests = ragged_requests(10, 3)
    for (prompt, *_), completion in zip(
        requests, ask(InProcessEngine(model, (1,), 64, torch.float32), requests), strict=True
    ):
        assert (
            abs(completion.behaviour_logp_T - fresh_logp(model, prompt, completion, SAMPLING.temperature)).max() < 1e-4
        )


def test_a_model_without_a_cache_is_refused_in_one_line():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(SoleraError, match="model: MambaForCausalLM") as refusal:
        LanguageModel(MambaForCausalLM(config).eval()).check()
    assert "\n" not in str(refusal.value)


def test_a_model_that_caps_its_logits_is_split_right():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5,
    )  # fmt: skip
    model = LanguageModel(Gemma2ForCausalLM(config).eval())
    model.check()
    assert not model.takes_any_mask  # some of its layers see a window only


def test_a_model_that_does_something_unknown_to_its_logits_is_refused():
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, logits_scaling=8.0, initializer_range=0.5,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(SoleraError, match="not a plain body and head"):
        LanguageModel(GraniteForCausalLM(config).eval()).check()


def test_a_name_that_looks_like_a_hubs_but_lies_in_a_folder_here_is_not_asked_of_a_hub(tmp_path, monkeypatch):
    from solera.models.source import EMBEDDED, find

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(SoleraError, match="there is no such folder in runs"):
        find("runs/fist")
    (tmp_path / "runs" / "first" / "model").symlink_to(EMBEDDED)
    with pytest.raises(SoleraError, match="did you mean runs/first/model"):
        find("runs/first")
    assert find("owner/name") == "owner/name"
