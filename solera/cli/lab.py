"""`solera lab`: exact results on policies small enough to enumerate."""

HELP = """Show what an objective does to a policy that is so small that all responses can be enumerated. There is no
model and no sampling error. All experiments together take about a minute on one core. Tables are printed. Plots and
all numbers go into a folder.

  solera lab                                all experiments
  solera lab --quick                        with fewer problems and updates
  solera lab bias --objectives grpo topr    one experiment, two objectives
  solera lab bias --lags 0 8                fresh and stale data
"""


def run(arguments: list[str]) -> int:
    import tyro

    from solera.cli.options import parse
    from solera.lab.options import LabOptions, check

    if {"-h", "--help"} & set(arguments):
        arguments = ["--help"]  # if an experiment is named, tyro leaves the experiments out of the help
    options = check(parse(LabOptions(), arguments, "lab", "", HELP, tyro.conf.FlagCreatePairsOff))
    from solera.lab import laboratory
    from solera.report.console import results_console

    laboratory.run(options, results_console(120))
    return 0
