"""`solera lab`: exact answers on policies small enough to enumerate."""

import sys

HELP = """What an objective does to a policy so small that every response can be written down: no model, no sampling
error, minutes on one core. Tables on the console; plots and every number in a folder.

  solera lab                                all experiments
  solera lab --quick                        with fewer problems and updates
  solera lab bias --objectives grpo topr    one of them, with two objectives
  solera lab bias --lags 0 8                on fresh and on stale data
"""


def run(arguments: list[str]) -> int:
    import tyro
    from rich.console import Console

    from solera.cli.options import parse
    from solera.lab.options import LabOptions, check

    options = check(parse(LabOptions(), arguments, "lab", "", HELP, tyro.conf.FlagCreatePairsOff))
    from solera.lab import laboratory

    # Off a terminal nothing is known of the width, and a wrapped table is hard to read.
    laboratory.run(options, Console(width=None if sys.stdout.isatty() else 120))
    return 0
