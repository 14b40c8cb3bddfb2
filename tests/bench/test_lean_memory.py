"""`benchmarks/lean_memory.py`: the real script with a tiny model on a CPU, and the sizes of its large ones."""

import re
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.command import ROOT, run_script

SCRIPT = ROOT / "benchmarks" / "lean_memory.py"
SMALL = ("--size", "tiny", "--prompts", "2", "--group", "4", "--new_tokens", "8", "--device", "cpu")


@pytest.mark.parametrize("further", [("--memory", "full"), ("--memory", "lean"), ("--memory", "lean", "--lora", "4")])
def test_three_steps_change_weights_and_are_measured(further, tmp_path):
    done = run_script(SCRIPT, *SMALL, *further, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^step \d: generate [\d.]+ s \([\d,]+ tokens/s, mean length ", done.stdout, re.M)) == 3
    changed, total = map(int, re.search(r"^(\d+) of (\d+) trained tensors changed$", done.stdout, re.M).groups())
    assert 0 < changed <= total
    assert total == (28 if "--lora" in further else 20)  # two layers of nine tensors and two more, or seven pairs each
    assert re.search(r"decoding [\d,]+ tokens/s, peak [\d.]+ GiB", done.stdout)
    assert not list(tmp_path.iterdir())


def test_the_large_ones_have_the_published_sizes(monkeypatch):
    """Llama 3.1 8B has 8,030,261,248 weights; `solera bench` has a model of 1,560,381,440."""
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    from lean_memory import SIZES

    for size, expected in (("8b", 8_030_261_248), ("1.5b", 1_560_381_440)):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**SIZES[size]))
        assert sum(p.numel() for p in model.parameters()) == expected
