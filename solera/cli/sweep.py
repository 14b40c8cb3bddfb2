"""`solera sweep`: a grid of runs from one file, side by side, resumable, with one report."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from solera.cli import main
from solera.cli.options import Parser, wrapped
from solera.errors import counted

if TYPE_CHECKING:
    from rich.console import Console

    from solera.sweep.plan import Plan, PlannedRun

HELP = """Train every cell of a grid with every seed, and compare them: means, spread over seeds, paired tests, curves.

  solera sweep FILE.toml            start, or go on with what is not finished
  solera sweep FILE.toml --quick    first a small one: the file's [quick]
  solera sweep FILE.toml --retry    try failed runs again as well
  solera sweep FILE.toml --report   the report of what there is
  solera sweep FILE.toml --only algorithm=grpo --only regime=lag10    these only
"""

EXAMPLE = """A file is an ordinary run's tables and these:

  [sweep]
  seeds = 5                          # a number of seeds, or a list
  baseline = { algorithm = "grpo" }  # by default the first choice below
  measure = "final"                  # of final, best, mean accuracy: ranked by
  exclude = [{ algorithm = "reinforce", regime = "never" }]

  [axis.algorithm]                   # compared: names, and the fields they set
  grpo = { objective.name = "grpo" }
  reinforce = { objective.name = "reinforce" }

  [axis.regime]                      # circumstances: each has a table
  on_policy = { sync.period = 1 }
  lag10 = { sync.period = 1, collect.offset = 10 }
  never = { sync.rule = "never" }

  [run]                              # what all cells share
  steps = 100

  [quick]                            # --quick: any field, fewer choices
  seeds = 2
  keep = { regime = ["on_policy"] }
  run.steps = 10

Every cell is checked before the first run starts. All goes into sweeps/NAME: runs/ (ordinary run folders), logs/,
report.html, report.md, curves.png, results.json. Ctrl-C: the runs finish their batch, save and leave; the same command
goes on. The exit status is 0 where all runs are finished, 1 where some failed, 130 where it was stopped."""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "solera sweep",
        description=wrapped(HELP),
        epilog=wrapped(EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="the sweep")
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help="runs side by side; by default one a core, fewer where the file sets run.threads; with a GPU, as many as "
        "its memory holds: often 1",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="with the changes of [quick], in sweeps/NAME-quick")
    parser.add_argument(
        "--only", action="append", default=[], metavar="AXIS=CHOICE",
        help="run only the cells with this choice; may be given several times",
    )  # fmt: skip
    parser.add_argument("--retry", action="store_true", help="try failed runs again")
    parser.add_argument("--report", action="store_true", help="start nothing, write the report")
    chosen = parser.parse_args(arguments)
    if chosen.jobs is not None and chosen.jobs < 1:
        parser.error(f"--jobs is {chosen.jobs}; it must be at least 1")
    return _sweep(chosen)


def _sweep(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from solera.sweep.file import read_plan
    from solera.sweep.runner import run_all
    from solera.sweep.state import refuse_changed

    plan, console = read_plan(chosen.file, chosen.quick), Console(highlight=False, soft_wrap=True)
    wanted = plan.only(chosen.only)
    refuse_changed(plan)
    if chosen.report:
        _report(plan, wanted, console)
        return 0
    jobs, cells = chosen.jobs or _fitting(plan), len(wanted) // len(plan.seeds)
    size = f"{counted(cells, 'cell')} × {counted(len(plan.seeds), 'seed')}"
    console.print(f"{plan.name}: {size}, {jobs} at a time, in {plan.folder}")
    stopped = not run_all(plan, wanted, jobs, chosen.retry, console, main)
    complete = _report(plan, wanted, console)
    if stopped:
        print("solera: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0 if complete else 1


def _report(plan: "Plan", wanted: "list[PlannedRun]", console: "Console") -> bool:
    """Write the report, of all cells; whether the wanted runs are finished."""
    from solera.sweep.report import state_words, write
    from solera.sweep.results import collect

    results = collect(plan)
    console.print(f"{state_words(results)}\nreport {write(results)}")
    return all(result.state == "finished" for result in results.runs if result.run in wanted)


def _fitting(plan: "Plan") -> int:
    """As many runs as leave a core to each thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(cell.config.run.threads for cell in plan.cells))
