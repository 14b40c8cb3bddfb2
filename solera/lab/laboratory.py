"""Run the experiments: write `lab.json` and one plot each, and print tables."""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.text import Text

from solera.errors import SoleraError
from solera.folder.files import appearing, write_whole
from solera.lab.options import LabOptions


def run(options: LabOptions, console: Console) -> None:
    """Run the chosen experiments in order. Finished experiments stay in the folder if the lab is interrupted."""
    torch.set_num_threads(1)  # the tensors are tiny; more threads would only wait for each other
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
        with appearing(plot) as unfinished:
            experiment.draw(found[name]).savefig(unfinished)
        console.print(Text(f"{name}: {perf_counter() - start:.0f} s, {plot}\n"), soft_wrap=True)
        write_whole(numbers, json.dumps(found))


def _kept(numbers: Path) -> dict[str, Any]:
    """The numbers of earlier experiments in this folder."""
    try:
        found = json.loads(numbers.read_bytes())
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise SoleraError(f"{numbers} was not written by the lab and would be overwritten: move it or set --out")
    return found


def _tracked(items: Iterable, does: str, console: Console) -> Iterable:
    return track(list(items), does, console=console, transient=True, disable=not console.is_terminal)
