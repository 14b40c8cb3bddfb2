"""TRL's step on the same work, in its own process, timed from outside."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from solera.bench.options import BenchOptions
from solera.errors import SoleraError
from solera.models.source import EMBEDDED
from solera.tasks.arithmetic import draw_pair

WHOLE_STEPS = """
import json, runpy, sys, time
from transformers.trainer_callback import DefaultFlowCallback as Flow
marks, types, on_step_end = [], set(), Flow.on_step_end
def marking(self, arguments, *others, **keywords):
    marks.append(time.perf_counter())
    types.add(f"weights {keywords['model'].dtype}, trained as they are" + ", bfloat16 autocast" * arguments.bf16)
    return on_step_end(self, arguments, *others, **keywords)
Flow.on_step_end = marking
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
import torch
peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
print(json.dumps({"marks": marks, "peak": peak, "types": types.pop().replace("torch.", "")}))
"""
"""Marks the end of each step. TRL's own `step_time` leaves out the optimiser step."""


WARM_UP = 2
"""Steps at the start that are not measured."""
VLLM = ("use_vllm=true", 'vllm_mode="colocate"')
"""Fields of TRL's GRPOConfig that make it generate with vLLM in its own process."""


def measure(options: BenchOptions, folder: Path, fields: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return seconds per whole step, and memory on a GPU. `fields` of GRPOConfig come before those of the options."""
    assert options.trl_step is not None
    problems = Path(options.problems).resolve() if options.problems else _sums(folder / "sums.jsonl")
    model = EMBEDDED if options.model == "embedded" else Path(options.model).resolve()
    on_gpu = options.device == "cuda"
    responses = options.prompts * options.group
    given = [part for field in (*fields, *options.trl_options) for part in ("--option", field)]
    command = [
        options.trl_python or sys.executable, "-c", WHOLE_STEPS, Path(options.trl_step).resolve(), model, problems,
        "--device", "cuda" if on_gpu else "cpu", "--prompts", options.prompts, "--group", options.group,
        "--new-tokens", options.new_tokens, "--micro-batch", min(options.trl_rows, responses) if on_gpu else responses,
        "--steps", (options.trl_steps or options.steps) + WARM_UP, *given,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    if done.returncode:
        raise SoleraError(f"TRL's step failed: {done.stderr.strip().splitlines()[-1] if done.stderr else 'no output'}")
    marked = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"marks'))
    whole = [after - before for before, after in itertools.pairwise(marked["marks"])][WARM_UP - 1 :]
    return {"steps": [{"whole": seconds} for seconds in whole], "peak": marked["peak"], "types": marked["types"]}


def _sums(path: Path) -> Path:
    rng = Random(0)
    pairs = [draw_pair(rng, 2, held_out=False) for _ in range(4000)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))
    return path
