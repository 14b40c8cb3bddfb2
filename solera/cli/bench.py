"""`solera bench`: what a training step costs, part by part, and beside TRL's."""

import signal
import sys

HELP = """Time whole training steps on this machine: decoding, grading and storing, learning, sync. With --trl_step
TRL's step runs on the same model, prompts and lengths, in turn, and the ratio is printed.

  solera bench                                      the embedded model
  solera bench --v 1 10 --rounds 3                  what a sync every step costs
  solera bench --trl_step benchmarks/trl_step.py    TRL's step beside ours
"""


def run(arguments: list[str]) -> int:
    import tyro

    from solera.bench.options import BenchOptions, check
    from solera.cli.options import parse

    options = check(parse(BenchOptions(), arguments, "bench", "", HELP, tyro.conf.FlagCreatePairsOff))
    from solera.bench import bench
    from solera.report.console import results_console

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # else the process measured would go on
    bench.run(options, results_console(200))
    return 0
