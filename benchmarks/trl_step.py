#!/usr/bin/env python3
"""Time TRL's GRPO step on the same work as ours. Prints one JSON object per step, then the median.

usage: trl_step.py MODEL PROMPTS.jsonl [--prompts 64 --group 8 --new-tokens 256 --micro-batch 128 --steps 4]
`solera bench --trl_step benchmarks/trl_step.py` runs it in turn with our step.

Each line of PROMPTS.jsonl is an object with `prompt` (text, chat template applied) and `answer`. The reward is 1 if
the last number in the response equals the answer. The script needs trl (tested with 1.16). If the package `datasets` is
missing, a stand-in with the few methods that TRL's trainer calls replaces it; this does not change the step.
"""

import argparse
import json
import os
import re
import statistics
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class ListDataset:
    cache_files = ()
    info = types.SimpleNamespace(builder_name=None, dataset_name=None, config_name=None)

    def __init__(self, rows):
        self.rows = list(rows)

    @classmethod
    def from_list(cls, rows):
        return cls(rows)

    @property
    def column_names(self):
        return list(self.rows[0])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return dict(self.rows[index]) if isinstance(index, int) else [dict(self.rows[i]) for i in index]

    def __iter__(self):
        return (dict(row) for row in self.rows)

    def map(self, function, **_):
        return ListDataset({**row, **function(row)} for row in self.rows)


def stand_in_for_datasets():
    module = types.ModuleType("datasets")
    module.__spec__, module.__version__ = ModuleSpec("datasets", None), "5.2.0"
    module.Dataset = ListDataset
    for name in ("IterableDataset", "DatasetDict", "IterableDatasetDict"):
        setattr(module, name, type(name, (dict,), {}))
    module.load_dataset = lambda *_, **__: sys.exit("datasets is not installed: its stand-in cannot load a dataset")
    sys.modules["datasets"] = module


def last_number_matches(completions, answer, **_):
    def value(text):
        numbers = re.findall(r"-?\d[\d,]*\.?\d*", text)
        return numbers[-1].replace(",", "").rstrip(".") if numbers else None

    return [float(value(text) == wanted) for text, wanted in zip(completions, answer, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts_file", type=Path)
    for name, default in (("prompts", 64), ("group", 8), ("new-tokens", 256), ("micro-batch", 128), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON: set any other GRPOConfig field")
    args = parser.parse_args()

    try:
        from datasets import Dataset
    except ImportError:
        stand_in_for_datasets()
        from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [json.loads(line) for line in args.prompts_file.read_text().splitlines()]
    on_gpu = args.device == "cuda"
    config = GRPOConfig(
        output_dir="trl_step_output",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=args.steps,
        num_generations=args.group,
        max_completion_length=args.new_tokens,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.group // args.micro_batch,
        learning_rate=1e-6,
        loss_type="grpo",
        beta=0.0,
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        **{name: json.loads(value) for name, _, value in (option.partition("=") for option in args.option)},
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=last_number_matches,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    wanted = ("step_time", "reward", "completions/mean_length", "num_tokens", "frac_reward_zero_std")
    steps = [{k: float(h[k]) for k in wanted} for h in trainer.state.log_history if "step_time" in h]
    for step in steps:
        print(json.dumps(step))
    print(json.dumps({"median_step_time": statistics.median(s["step_time"] for s in steps[1:] or steps)}))


if __name__ == "__main__":
    main()
