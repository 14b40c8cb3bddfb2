"""`solera report`: an HTML page about one run, or comparing several."""

from pathlib import Path

from solera.cli.options import Parser
from solera.folder.paths import REPORT

HELP = """Write one self-contained HTML page about one or more runs. They may be finished, running or killed. For each
run, the page has a one-sentence summary and shows curves, the age of the data, weight syncs, and groups with their
responses, rewards and expected answers. It also lists the differences between the configs."""


def run(arguments: list[str]) -> int:
    from solera.report.groups import GROUPS
    from solera.report.html import write_report

    parser = Parser("solera report", description=HELP)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="output file; default: report.html, in the run's folder for one run, in the current folder for several",
    )  # fmt: skip
    parser.add_argument(
        "--groups", type=int, default=GROUPS, metavar="N",
        help="maximum number of groups to show per run, spread over its steps (default: %(default)s)",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.groups < 0:
        parser.error(f"--groups is {chosen.groups}; it must be at least 0")
    single = chosen.runs[0] / REPORT if len(chosen.runs) == 1 else Path("report.html")
    print(f"report {write_report(chosen.runs, chosen.out or single, chosen.groups)}")
    return 0
