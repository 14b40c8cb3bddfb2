"""`solera sweep`: a grid of runs from one file, run in parallel, resumable, with one report."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from solera.cli import main
from solera.cli.options import Parser, wrapped
from solera.errors import counted

if TYPE_CHECKING:
    from rich.console import Console

    from solera.sweep.plan import Plan, PlannedRun

HELP = """Train every cell of a grid with every seed, and compare the cells: means, spread over seeds, paired tests and
curves.

  solera sweep FILE.toml            start, or continue what is not finished
  solera sweep FILE.toml --quick    a small test run: the file's [quick]
  solera sweep FILE.toml --retry    also try failed runs again
  solera sweep FILE.toml --report   report on the results so far
  solera sweep FILE.toml --minutes 9    stop in time; continue later
  solera sweep FILE.toml --only algorithm=grpo --only regime=lag10    these only
"""

EXAMPLE = """The file has the tables of an ordinary run and these:

  [sweep]
  seeds = 5                          # a number of seeds, or a list
  baseline = { algorithm = "grpo" }  # default: the first choice below
  measure = "final"                  # rank by final, best or mean accuracy
  exclude = [{ algorithm = "reinforce", regime = "never" }]

  [axis.algorithm]                   # what is compared: names and their fields
  grpo = { objective.name = "grpo" }
  reinforce = { objective.name = "reinforce" }

  [axis.regime]                      # conditions: each gets its own table
  on_policy = { sync.period = 1 }
  lag10 = { sync.period = 1, collect.offset = 10 }
  never = { sync.rule = "never" }

  [run]                              # shared by all cells
  steps = 100

  [quick]                            # --quick: any field, fewer choices
  seeds = 2
  keep = { regime = ["on_policy"] }
  run.steps = 10

Every cell is checked before the first run starts. Everything is written to sweeps/NAME: runs/ (ordinary run folders),
logs/, report.html, report.md, curves.png, results.json. On Ctrl-C the runs finish their batch, save and exit; the same
command continues. The exit status is 0 if all runs are finished, 1 if some are not, and 130 if you or --minutes stopped
the sweep.

results/ has a small file for each finished run. To continue on another machine, copy this folder and the sweep's file.
Runs that are not finished start again there, unless you copy their folder in runs/, too."""


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
        help="number of parallel runs; default on a CPU: one per core, fewer if the file sets run.threads; on a GPU: "
        "as many as fit into its free memory, at most 4. The runs share the GPU's memory and the cores equally",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, metavar="M",
        help="time limit: start no run that would not finish in time, and after M minutes let the active runs save and "
        "stop; the same command continues",
    )  # fmt: skip
    parser.add_argument(
        "--measure-gain", action="store_true",
        help="let the first run be alone, to measure how much faster several runs are side by side",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="apply [quick] and write to sweeps/NAME-quick")
    parser.add_argument(
        "--only", action="append", default=[], metavar="AXIS=CHOICE",
        help="run only the cells with this choice; can be repeated",
    )  # fmt: skip
    parser.add_argument("--retry", action="store_true", help="try failed runs again")
    parser.add_argument("--report", action="store_true", help="write the report without starting any run")
    chosen = parser.parse_args(arguments)
    if chosen.jobs is not None and chosen.jobs < 1:
        parser.error(f"--jobs is {chosen.jobs}; it must be at least 1")
    if chosen.minutes is not None and not chosen.minutes > 0:
        parser.error(f"--minutes is {chosen.minutes}; it must be above 0")
    return _sweep(chosen)


def _sweep(chosen: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from solera.run.forking import Processes
    from solera.sweep.file import read_plan
    from solera.sweep.machine import share_of
    from solera.sweep.runner import run_all
    from solera.sweep.state import refuse_changed

    plan, console = read_plan(chosen.file, chosen.quick), Console(highlight=False, soft_wrap=True)
    wanted = plan.only(chosen.only)
    refuse_changed(plan)
    if chosen.report:
        _report(plan, wanted, console)
        return 0
    cells = len(wanted) // len(plan.seeds)
    with Processes(signal.SIGINT) as processes:
        share = share_of(plan, chosen.jobs, processes)
        size = f"{counted(cells, 'cell')} × {counted(len(plan.seeds), 'seed')}"
        console.print(Text(f"{plan.name}: {size}, {share.words()}, in {plan.folder}"))
        stopped = not run_all(
            plan, wanted, share, console, main, processes, retry=chosen.retry, minutes=chosen.minutes,
            measure=chosen.measure_gain,
        )  # fmt: skip
    complete = _report(plan, wanted, console)
    if stopped:
        print("solera: stopped; run the same command to continue", file=sys.stderr)
        return 130
    return 0 if complete else 1


def _report(plan: "Plan", wanted: "list[PlannedRun]", console: "Console") -> bool:
    """Write the report on all cells. Return whether all wanted runs are finished."""
    from rich.text import Text

    from solera.sweep.report import state_words, summary, write
    from solera.sweep.results import collect

    results = collect(plan)
    page = write(results)
    for line in (*summary(results), state_words(results), f"report {page}"):
        console.print(Text(line))
    for cell, gain in results.gains().items():
        console.print(
            f"gain of {gain.active:.1f} active runs: {gain.factor:.2f} times the batches per second of one run ({cell})"
        )
    return all(result.state == "finished" for result in results.runs if result.run in wanted)
