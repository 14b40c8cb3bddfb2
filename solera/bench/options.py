"""Options of `solera bench`. This module does not import torch, so that `--help` is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from solera.config import Config, with_settings
from solera.errors import SoleraError
from solera.folder.files import writable
from solera.models.source import obtain

Size = Literal["tiny", "1.5b"]
Mode = Literal["lock_step", "stream", "drain"]


@dataclass(frozen=True)
class BenchOptions:
    """Time whole training steps, next to TRL's."""

    model: str = "embedded"
    """A Hugging Face folder, a hub name or `embedded`."""
    random_weights: Size | None = None
    """Instead of the model, use a Llama of this size with random weights and the model's tokenizer, on both sides. Its
    responses almost never end early or earn a reward, so add --unmasked; otherwise there is nothing to learn from."""
    problems: str | None = None
    """JSONL file with `prompt` (text, chat template applied) and `answer` (a number). Unset: sums of two-digit
    numbers."""
    prompts: int = 32
    """Prompts per step."""
    group: int = 8
    """Responses per prompt."""
    new_tokens: int = 8
    """Maximum number of tokens in a response."""
    steps: int = 20
    """Measured steps per round."""
    warm_up: int = 2
    """Steps at the start of a round that are not measured. With `--graphs`, updates are recorded in some of the
    first steps."""
    rounds: int = 1
    """How often each variant runs. Variants run in turn, each time in a new process."""
    v: tuple[int, ...] = (1,)
    """Sync periods to measure."""
    mode: tuple[Mode, ...] = ("lock_step",)
    """Ways to generate, one or more. `stream` generates while learning, with `collect.max_age = 2 * v`, and responses
    under way are continued after a sync (`sync.in_flight = "keep"`). `drain` also streams, but lets them end first."""
    overlap: bool | None = None
    """Generate the next batch while learning from the current one, between two syncs. Unset: the default for this
    device."""
    unmasked: bool = False
    """Learn from groups of equal reward too, as TRL does, so that both sides do the same work."""
    memory: Literal["full", "lean"] = "full"
    """How much memory our side trains with, as `learn.memory` of a run."""
    lora: int = 0
    """Rank of LoRA adapters on our side, as `lora.rank` of a run. 0 trains all weights."""
    graphs: bool = False
    """Record our updates as CUDA graphs on a GPU, as `learn.graphs` of a run."""
    micro_batch: int | None = None
    """Maximum number of tokens in one forward and backward pass on our side. Unset: the default."""
    threads: int = 1
    """CPU threads, the same on both sides."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for both sides."""
    gpu_memory: float | None = None
    """Maximum GPU memory for our side, in GiB. Unset: all free memory."""
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of our side, as `model.compute` of a run."""
    settings: tuple[str, ...] = ()
    """More settings of our side, as KEY=VALUE: sampling.temperature=0.5 engine.max_rows=2048. Each replaces what the
    other options say."""
    compile: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """`--no_compile` does not compile our layers. By default they are compiled on a GPU, as in a run."""
    trl_step: str | None = None
    """Script that runs TRL's step: benchmarks/trl_step.py in the repository. Unset: measure only ours."""
    trl_python: str | None = None
    """Python interpreter that has TRL installed. Unset: this one."""
    trl_steps: int | None = None
    """Measured steps per round of TRL, after two that are not. Unset: as many as ours."""
    trl_rows: int = 128
    """Responses in one forward and backward pass of TRL."""
    trl_options: tuple[str, ...] = ()
    """More fields of TRL's GRPOConfig, as NAME=JSON."""
    trl_vllm: bool = False
    """Also measure TRL with vLLM, inside TRL's process."""
    json: str | None = None
    """File for the numbers of every measured step."""


def check(options: BenchOptions) -> BenchOptions:
    """Raise a one-line error for options that cannot be measured."""
    for name in ("prompts", "group", "new_tokens", "steps", "warm_up", "rounds", "threads", "trl_rows", "trl_steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise SoleraError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.group < 2:
        raise SoleraError("--group is 1; it must be at least 2, as one response has no baseline")
    if not options.v or min(options.v) < 1:
        given = " ".join(map(str, options.v)) or "empty"
        raise SoleraError(f"--v is {given}; give one or more sync periods of at least 1")
    if twice := [v for v in options.v if options.v.count(v) > 1]:
        raise SoleraError(f"--v is {' '.join(map(str, options.v))}: {twice[0]} is there twice (--rounds repeats)")
    if not options.mode or len(set(options.mode)) < len(options.mode):
        raise SoleraError(f"--mode is {' '.join(options.mode) or 'empty'}; give lock_step, stream or drain, each once")
    with_settings(Config(), options.settings, "--settings")
    if options.overlap is not None and options.mode != ("lock_step",):
        raise SoleraError("--overlap has no effect on streaming: measure them in two calls")
    for name in ("problems", "trl_step"):
        path = getattr(options, name)
        if path is not None and not Path(path).is_file():
            raise SoleraError(f"--{name}: {path}: no such file")
    if options.json is not None:
        writable(Path(options.json), f"--json {options.json}")
    if options.device == "cpu":
        refuse_without_gpu(options)
    obtain(options.model)
    if options.trl_vllm and options.trl_step is None:
        raise SoleraError("--trl_vllm measures TRL's step: give the script that runs it with --trl_step")
    return options


def refuse_without_gpu(options: BenchOptions) -> None:
    if options.gpu_memory is not None:
        raise SoleraError("--gpu_memory is set, but this runs on a CPU: remove it")
