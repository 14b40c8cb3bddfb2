"""Print accuracy against the number of syncs from the finished runs of a sweep: mean ± standard deviation over seeds.

python benchmarks/accuracy_by_syncs.py sweeps/adaptive
"""

import argparse
import json
import statistics
from pathlib import Path

from solera.report.sinks import read_metrics


def row(cell: str, runs: list[dict]) -> str:
    """One line of the table: number of syncs and accuracies of a cell."""
    syncs = [read_metrics(Path(run["folder"]) / "metrics.jsonl")[-2]["sync/count"] for run in runs]
    figures = [spread([100 * run["measures"][name] for run in runs]) for name in ("mean", "final", "best")]
    return f"| {cell} | {spread(syncs)} | {' | '.join(figures)} | {len(runs)} |"


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.1f} ± {deviation:.1f}"


def main(folder: Path) -> None:
    finished = [run for run in json.loads((folder / "results.json").read_text())["runs"] if run["measures"]]
    print(
        "| cell | syncs | mean accuracy, % | final, % | best, % | seeds |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for cell in dict.fromkeys(run["cell"] for run in finished):
        print(row(cell, [run for run in finished if run["cell"] == cell]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    main(parser.parse_args().sweep)
