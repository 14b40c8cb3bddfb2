"""Runs experiments: numbers into `lab.json`, a plot each, tables on the console."""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from solera.errors import SoleraError
from solera.folder.files import write_whole
from solera.lab.options import LabOptions


def run(options: LabOptions, console: Console) -> None:
    """Every experiment asked for, in its order. What an interrupted lab had finished is in its folder."""
    torch.set_num_threads(1)  # tensors of a few numbers: more threads would wait for each other
    folder = Path(options.out or ("runs/lab-quick" if options.quick else "runs/lab"))
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / "lab.json"
    found = _kept(numbers) if numbers.exists() else {}
    for name in options.experiments:
        experiment = importlib.import_module(f"solera.lab.{name}")
        start = perf_counter()
        found[name] = experiment.measure(options, lambda items, does: _tracked(items, does, console))
        for table in experiment.tables(found[name]):
            console.print(table)
        plot = folder / f"{name}.png"
        experiment.draw(found[name]).savefig(plot)
        console.print(f"{name}: {perf_counter() - start:.0f} s, {plot}\n", highlight=False, soft_wrap=True)
        write_whole(numbers, json.dumps(found))


def _kept(numbers: Path) -> dict[str, Any]:
    """Other experiments' numbers, whose plots are beside them."""
    try:
        found = json.loads(numbers.read_bytes())
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise SoleraError(f"{numbers}: holds no lab's numbers, and would be written over: move it, or name a --out")
    return found


def _tracked(items: Iterable, does: str, console: Console) -> Iterable:
    return track(list(items), does, console=console, transient=True, disable=not console.is_terminal)
