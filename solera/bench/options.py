"""What can be measured. No torch, so that help answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from solera.errors import SoleraError
from solera.folder.files import writable
from solera.models.source import obtain

Size = Literal["tiny", "1.5b"]


@dataclass(frozen=True)
class BenchOptions:
    """Time whole training steps, and TRL's beside them."""

    model: str = "embedded"
    """A Hugging Face folder, a hub name or `embedded`."""
    random_weights: Size | None = None
    """A Llama of this size with random weights and the model's tokenizer in place of the model, on both sides. Its
    responses hardly ever end before their limit nor earn a reward: add --unmasked, or nothing is learned from."""
    problems: str | None = None
    """JSONL with `prompt` (text, chat template applied) and `answer` (a number); unset: sums of two-digit numbers."""
    prompts: int = 32
    """Prompts a step."""
    group: int = 8
    """Responses a prompt."""
    new_tokens: int = 8
    """Most tokens of a response."""
    steps: int = 20
    """Steps measured in a round, after two that are not."""
    rounds: int = 1
    """How often each variant runs, in turn, each time in a process of its own."""
    v: tuple[int, ...] = (1,)
    """Sync periods to measure."""
    overlap: bool | None = None
    """Whether the next batch is written while one is learned from, between two syncs; unset: as by default here."""
    unmasked: bool = False
    """Learn from groups of equal reward too, as TRL does: the same work on both sides."""
    micro_batch: int | None = None
    """Tokens in one forward and backward of ours; unset: the default."""
    threads: int = 1
    """CPU threads, the same on both sides."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where both run."""
    gpu_memory: float | None = None
    """Most memory of the GPU that our side takes, in GiB; unset: what is free."""
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of our side, `model.compute` of a run."""
    compile: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """`--no_compile` leaves our layers as they are; without it they are fused on a GPU, as in a run by default."""
    trl_step: str | None = None
    """The script that runs TRL's step, benchmarks/trl_step.py in the repository; unset: only ours is measured."""
    trl_python: str | None = None
    """A Python that has TRL; unset: this one."""
    trl_rows: int = 128
    """Responses in one forward and backward of TRL's."""
    trl_options: tuple[str, ...] = ()
    """Further fields of TRL's GRPOConfig, as NAME=JSON."""
    trl_vllm: bool = False
    """Measure TRL a second time, generating with vLLM inside its process."""
    json: str | None = None
    """File to write every measured step to."""


WARM_UP = 2
"""Steps at the start of a round that are not counted."""


def check(options: BenchOptions) -> BenchOptions:
    """Refuse, in one line, what cannot be measured."""
    for name in ("prompts", "group", "new_tokens", "steps", "rounds", "threads", "trl_rows"):
        if getattr(options, name) < 1:
            raise SoleraError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.group < 2:
        raise SoleraError("--group is 1; it must be at least 2, as one response has no baseline")
    if not options.v or min(options.v) < 1:
        given = " ".join(map(str, options.v)) or "empty"
        raise SoleraError(f"--v is {given}; give one or more sync periods of at least 1")
    if twice := [v for v in options.v if options.v.count(v) > 1]:
        raise SoleraError(f"--v is {' '.join(map(str, options.v))}: {twice[0]} is there twice (--rounds repeats)")
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
