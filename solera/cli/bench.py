"""`solera bench`: the time of a training step, by part, optionally compared with TRL."""

import signal
import sys

HELP = """Time complete training steps on this machine: decoding, grading and storing, learning, sync. With --trl_step,
also time TRL's step on the same model, prompts and lengths, in turn, and print the ratio.

  solera bench                                      the embedded model
  solera bench --v 1 10 --rounds 3                  cost of a sync every step
  solera bench --trl_step benchmarks/trl_step.py    compare with TRL's step
"""


def run(arguments: list[str]) -> int:
    import tyro

    from solera.bench.options import BenchOptions, check
    from solera.cli.options import parse

    options = check(parse(BenchOptions(), arguments, "bench", "", HELP, tyro.conf.FlagCreatePairsOff))
    from solera.bench import bench
    from solera.report.console import results_console

    # Otherwise the measured process would keep running.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    bench.run(options, results_console(200))
    return 0
