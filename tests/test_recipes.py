"""Every recipe can be read and resolved; those of real models are built, with small parts of the same kind in place of
what would be fetched."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from solera.config import load
from solera.objectives.table import resolve_config
from solera.run import running

RECIPES = sorted(path for path in Path("recipes").glob("*.toml") if not path.name.startswith("sweep"))
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def small_chat_model(tmp_path_factory) -> Path:
    """A random Llama whose tokenizer knows every byte and has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=8192, eos_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_resolves_and_says_what_to_expect(path):
    config = resolve_config(load(path))
    header = re.match(r"(#.*\n)+", path.read_text())[0]
    assert "Expect" in header
    assert config.run.steps > 0


@pytest.mark.parametrize("name", ["gsm8k_qwen2.5_0.5b", "deepscaler_r1_1.5b", "gsm8k_warm_start", "gym_smollm2"])
def test_a_dry_run_takes_a_step(tmp_path, monkeypatch, small_chat_model, name):
    recipe = Path(f"recipes/{name}.toml").resolve()
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}", "problem": f"{split} {i}", "answer": f"so #### {i}"} for i in range(8)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    config = load(recipe)
    task = config.task if config.task.path is None else dataclasses.replace(config.task, path="data")
    if task.held_out_path is not None:
        task = dataclasses.replace(task, held_out_path="data/test.jsonl")
    config = dataclasses.replace(
        config,
        task=task,
        run=dataclasses.replace(config.run, steps=1, device="cpu", name="dry"),
        model=dataclasses.replace(config.model, path=str(small_chat_model)),
        collect=dataclasses.replace(config.collect, prompts=2, group_size=min(2, config.collect.group_size)),
        sampling=dataclasses.replace(config.sampling, max_tokens=6),
        evaluate=dataclasses.replace(config.evaluate, problems=3),
        report=dataclasses.replace(config.report, tensorboard=False, progress=False),
    )
    result = running.train(config)
    assert (result.model / "config.json").is_file()
    assert "eval/pass@1" in result.metrics[-1]
