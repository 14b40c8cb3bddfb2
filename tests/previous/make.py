"""Write the runs that `test_previous.py` continues. Run it only at the commit whose runs are to be kept:

    PYTHONPATH=. .venv/bin/python -m tests.previous.make

Each kind of run is made twice with one seed: once to its end, and once killed in batch 6 or 7, after the checkpoint of
step 4. The killed run's folder is kept, together with what the whole run came to.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
KINDS = {
    "plain": 'model.path = "model"\nobjective.name = "grpo"\nsync.period = 3\nlearn.passes = 2\nlearn.minibatches = 2',
    "replay": 'model.path = "model"\n'
    'objective.name = "rec_oneside_is"\nobjective.beta = 0.02\ndraw.policy = "replay"\n'
    'sync = { rule = "adaptive", metric = "kl", set_point = 0.1, v_max = 4 }',
    "lora": 'model.path = "embedded"\n'  # an adapter keeps the absolute path of its model
    'objective.name = "opmd"\nsync.period = 2\nlora = { rank = 2, alpha = 4.0 }\ncollect.offset = 1',
}
RUN = """
run = { root = ".", name = "run", steps = 12, device = "cpu", threads = 1, seed = 5 }
collect.prompts = 4
collect.group_size = 4
collect.overlap = false
sampling.max_tokens = 6
reward.functions = ["marks.py:mark"]
learn.lr = 0.001
learn.warmup = 2
diagnose = { probe_prompts = 4, probe_group = 2, every = 2 }
evaluate = { every = 0, problems = 8 }
checkpoint = { every = 4, keep = 9 }
report = { tensorboard = false, progress = false }
"""
MARKS = '''"""A reward that random text can earn; the process kills itself when asked to."""

import os
import signal
from pathlib import Path


def mark(completions, **kwargs):
    rows = Path("run/metrics.jsonl")
    if rows.exists() and len(rows.read_text().splitlines()) >= int(os.environ.get("KILL_AFTER_ROWS", 99)):
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(map(ord, text)) % 5 / 4 for text in completions]
'''


def make_model(folder: Path) -> None:
    import solera.models

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=1,
        bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    embedded = Path(solera.models.__file__).parent / "embedded"
    AutoTokenizer.from_pretrained(embedded).save_pretrained(folder)


def train(folder: Path, **environment: str) -> int:
    command = [sys.executable, "-m", "solera.cli", "train", "run.toml"]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=False).returncode


def rows(run: Path) -> list[dict[str, float]]:
    """The metrics of every step, without the times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def make(kind: str, settings: str, scratch: Path) -> None:
    for name in ("whole", "killed"):
        folder = scratch / name
        folder.mkdir()
        make_model(folder / "model")
        (folder / "marks.py").write_text(MARKS)
        (folder / "run.toml").write_text(RUN + settings + "\n")
    assert train(scratch / "whole") == 0
    assert train(scratch / "killed", KILL_AFTER_ROWS="6") == -9
    shutil.copytree(scratch / "whole" / "run" / "model", scratch / "killed" / "expected")
    (scratch / "killed" / "expected" / "rows.json").write_text(json.dumps(rows(scratch / "whole" / "run")))
    print(kind, "killed with", sorted(path.name for path in (scratch / "killed" / "run" / "checkpoints").iterdir()))
    with tarfile.open(HERE / f"{kind}.tar.xz", "w:xz") as archive:
        archive.add(scratch / "killed", kind)


def machine() -> dict[str, str]:
    """What the last bits of a run depend on, besides the code."""
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "processor": "".join(processor[:1]), "capability": capability}


if __name__ == "__main__":
    (HERE / "machine.json").write_text(json.dumps(machine()) + "\n")
    for kind, settings in KINDS.items() if len(sys.argv) == 1 else [(kind, KINDS[kind]) for kind in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as scratch:
            make(kind, settings, Path(scratch))
