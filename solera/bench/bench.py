"""Run rounds of steps, ours and TRL's in turn, and print a table of the times."""

import dataclasses
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from solera.bench import peer
from solera.bench.options import BenchOptions, Mode, refuse_without_gpu
from solera.errors import SoleraError, counted
from solera.folder.files import write_whole
from solera.run.forking import Processes

Measured = dict[str, list[dict[str, Any]]]
PEAK_FLOPS = {"NVIDIA H200": 790e12}
"""Measured peak of bfloat16 matrix products, in operations per second."""
STREAM = {"stream": ", stream", "drain": ", stream, drain"}
"""Ends of the names of streaming variants."""
LINES = (
    "whole step", "mean", "slowest", "generate", "engine decodes", "learn", "sync", "sync: proof", "diagnose", "rest",
    "tokens/s decoding", "tokens/s overall", "of peak", "memory",
)  # fmt: skip


def run(options: BenchOptions, console: Console) -> Measured:
    """Measure every variant `rounds` times, interleaved; print and write each result at once, then print the table.

    A variant that fails is skipped from then on, and named again after the table.
    """
    rounds: Measured = defaultdict(list)
    failed: dict[str, SoleraError] = {}
    with (
        Processes(signal.SIGKILL, options.threads) as processes,
        tempfile.TemporaryDirectory() as folder,
        console.status("measuring") as status,
    ):
        options = _with_random_weights(_settle(options), Path(folder), status)
        variants = _variants(options, Path(folder), processes)
        for number, (name, measure) in itertools.product(range(options.rounds), variants):
            if name in failed:
                continue
            status.update(f"round {number + 1} of {options.rounds}: {name}")
            try:
                found = measure()
            except SoleraError as error:
                failed[name] = error
                console.print(Text(f"{name}: {error}"))
                continue
            rounds[name].append(found)
            if options.json:
                write_whole(Path(options.json), json.dumps({"options": dataclasses.asdict(options), "rounds": rounds}))
            seconds = _spread([step["whole"] for step in found["steps"]])
            console.print(f"round {number + 1}, {name}: {seconds} s per step", highlight=False)
    if not any("parameters" in several[0] for several in rounds.values()):
        raise next(iter(failed.values()))
    console.print(_table(rounds))
    console.print(_machine(options, rounds), highlight=False)
    if failed:
        raise SoleraError(f"not measured: {', '.join(failed)}")
    return rounds


def _with_random_weights(options: BenchOptions, folder: Path, status: Status) -> BenchOptions:
    if options.random_weights is None:
        return options
    from solera.bench import random_model

    status.update("writing random weights")
    written = random_model.write(options.random_weights, options.model, folder / "model", options.device)
    return dataclasses.replace(options, model=written)


def _variants(
    options: BenchOptions, folder: Path, processes: Processes
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    ours = [
        (f"Solera, v = {v}{_manner(options, v, mode)}", partial(_ours, options, v, mode, folder, processes))
        for v in options.v
        for mode in options.mode
    ]
    trl = [("TRL", partial(peer.measure, options, folder))] if options.trl_step else []
    vllm = [("TRL with vLLM", partial(peer.measure, options, folder, peer.VLLM))] if options.trl_vllm else []
    return [*ours, *trl, *vllm]


def _manner(options: BenchOptions, v: int, mode: Mode) -> str:
    if mode != "lock_step":
        return STREAM[mode]
    if v == 1 or options.overlap is None:
        return ""
    return ", overlap" if options.overlap else ", no overlap"


def _settle(options: BenchOptions) -> BenchOptions:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SoleraError("--device is cuda, but torch finds no GPU here: use cpu or auto")
    gpu = options.device != "cpu" and torch.cuda.is_available()
    if not gpu:
        refuse_without_gpu(options)
    return dataclasses.replace(options, device="cuda" if gpu else "cpu")


def _ours(options: BenchOptions, v: int, mode: Mode, folder: Path, processes: Processes) -> dict[str, Any]:
    """Measure our step in its own process, as TRL's is."""
    result, errors = folder / "result.json", folder / "errors.txt"
    job = processes.start(_measure_ours, options, v, mode, result, errors)
    job.join()
    if job.exitcode:
        written = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = [line for line in written if not line.startswith("while attempting")]
        raise SoleraError(f"our step failed: {said[-1] if said else 'no output'}")
    return json.loads(result.read_text(encoding="utf-8"))


def _measure_ours(options: BenchOptions, v: int, mode: Mode, result: Path, errors: Path) -> None:
    """The main function of the process. Its messages go to a file."""
    from solera.bench.ours import measure

    with errors.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    result.write_text(json.dumps(measure(options, v, mode)), encoding="utf-8")


def _table(rounds: Measured) -> Table:
    """One column per variant, so that the table fits a terminal."""
    table = Table("", title="seconds per step: median (quartiles)")
    for name in rounds:
        table.add_column(name, justify="right")
    for line, *values in zip(LINES, *(_column(several) for several in rounds.values()), strict=True):
        if any(values):
            table.add_row(line, *values)
    if any(gains := [_gain(name, rounds) for name in rounds]):
        table.add_row("tokens/s, of lock-step's", *gains)
    for other in (name for name in rounds if name.startswith("TRL")):
        table.add_row(f"of {other}'s step", *(_ratio(several, rounds[other]) for several in rounds.values()))
    return table


def _gain(name: str, rounds: Measured) -> str:
    """Median and range over rounds of a streaming variant's tokens/s, divided by those of lock-step with the same v."""
    lock_step = rounds.get(name.partition(STREAM["stream"])[0])
    if STREAM["stream"] not in name or lock_step is None:
        return ""
    return _range([_overall(a) / _overall(b) for a, b in zip(rounds[name], lock_step, strict=False)])


def _overall(one: dict[str, Any]) -> float:
    """Tokens generated per second of the measured steps."""
    return sum(step["tokens/generated"] for step in one["steps"]) / sum(step["whole"] for step in one["steps"])


def _ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Median and range of the ratios over rounds. One side may have fewer rounds, if it failed in a later one."""
    if "parameters" not in ours[0]:
        return ""
    return _range([_median(a, "whole") / _median(b, "whole") for a, b in zip(ours, theirs, strict=False)])


def _range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"


def _column(several: list[dict[str, Any]]) -> list[str]:
    """The times the loop waits for, and the time the engine decodes: within `generate`, or during learning if the next
    batch is generated ahead."""
    steps = [step for one in several for step in one["steps"]]
    whole = [step["whole"] for step in steps]
    memory = f"{max(one['peak'] for one in several) / 2**30:.1f} GiB"
    if "time/learn" not in steps[0]:
        return [
            _spread(whole),
            f"{statistics.fmean(whole):.4f}",
            f"{max(whole):.4f}",
            *[""] * (len(LINES) - 4),
            memory if several[0]["peak"] else "",
        ]
    decode, generate, learn, sync, proof, diagnose = (
        [step[f"time/{name}"] for step in steps]
        for name in ("decode", "generate", "learn", "sync", "proof", "diagnose")
    )
    rest = [w - sum(parts) for w, *parts in zip(whole, generate, learn, sync, diagnose, strict=True)]
    tokens = sum(step["tokens/generated"] for step in steps)
    return [
        _spread(whole),
        f"{statistics.fmean(whole):.4f}",
        f"{max(whole):.4f}",
        f"{statistics.median(generate):.3f}",
        f"{statistics.fmean(decode):.3f}",
        f"{statistics.median(learn):.3f}",
        f"{statistics.fmean(sync):.4f}",
        _with_share(proof, whole),
        _with_share(diagnose, whole),
        f"{statistics.median(rest):.3f}",
        f"{tokens / sum(decode):,.0f}" if tokens else "",
        f"{tokens / sum(whole):,.0f}" if tokens else "",
        _share_of_peak(several),
        memory,
    ]


def _share_of_peak(several: list[dict[str, Any]]) -> str:
    """Share of the GPU's peak speed: 6 operations per parameter and token that went through the learner, 4 with LoRA,
    which needs no gradient of the model's own weights."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if several[0]["device"].startswith(name)), None)
    if peak is None:
        return ""
    shares = [
        (4 if one.get("lora") else 6) * one["parameters"] * step.get("tokens/computed", 0.0) / step["time/learn"] / peak
        for one in several
        for step in one["steps"]
    ]
    return f"{statistics.median(shares):.1%}"


def _with_share(part: list[float], whole: list[float]) -> str:
    """Use means, because not every step has such a part."""
    return f"{statistics.fmean(part):.4f} ({sum(part) / sum(whole):.1%})"


def _median(one: dict[str, Any], name: str) -> float:
    return statistics.median(step[name] for step in one["steps"])


def _spread(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"{seconds[0]:.4f}"
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle:.4f} ({low:.4f}–{high:.4f})"


def _machine(options: BenchOptions, rounds: Measured) -> str:
    import torch
    import transformers

    ours = next(iter(rounds.values()))[0]
    tokens = [step["response/length"] for step in ours["steps"]]
    return (
        f"{time.strftime('%Y-%m-%d')} · {ours['device']}, {platform.machine()}, "
        f"{counted(options.threads, 'thread')} · Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__} · "
        f"{options.prompts} × {options.group} responses of up to {options.new_tokens} tokens (mean "
        f"{statistics.fmean(tokens):.0f}) · ours: {ours['parameters']:,} parameters, {ours['types']}"
        + "".join(f" · {name}: {several[0]['types']}" for name, several in rounds.items() if name.startswith("TRL"))
    )
