"""`solera lab`: exact answers on policies small enough to enumerate."""

HELP = """What an objective does to a policy so small that every response can be written down: no model, no sampling
error, minutes on one core. Tables on the console; plots and every number in a folder.

  solera lab                                all experiments
  solera lab --quick                        with fewer problems and updates
  solera lab bias --objectives grpo topr    one of them, with two objectives
  solera lab bias --lags 0 8                on fresh and on stale data
"""


def run(arguments: list[str]) -> int:
    import tyro

    from solera.cli.options import parse
    from solera.lab.options import LabOptions, check

    if {"-h", "--help"} & set(arguments):
        arguments = ["--help"]  # with an experiment named, tyro would leave them all out
    options = check(parse(LabOptions(), arguments, "lab", "", HELP, tyro.conf.FlagCreatePairsOff))
    from solera.lab import laboratory
    from solera.report.console import results_console

    laboratory.run(options, results_console(120))
    return 0
