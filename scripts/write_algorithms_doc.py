#!/usr/bin/env python3
"""Write the table of docs/algorithms.md from `solera/objectives/table.py`. A test checks that it is up to date.

.venv/bin/python scripts/write_algorithms_doc.py
"""

from pathlib import Path

from solera.config import ObjectiveConfig
from solera.objectives.table import TABLE, resolve

DOC = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
START, STOP = "<!-- table: scripts/write_algorithms_doc.py -->\n", "<!-- end of table -->\n"
FUNCTIONS = "../solera/objectives/terms.py"


def table() -> str:
    lines = ["| name | loss | advantage · aggregation · mask | constants | function | when to use it | reference |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, row in TABLE.items():
        config = resolve(ObjectiveConfig(name))
        parts = f"{config.advantage or '–'} · {config.aggregation} · {'on' if config.zero_variance_mask else 'off'}"
        constants = {
            field: getattr(config, field)
            for field in (*row.constants, "drop", "regulariser", "regulariser_weight", "delta", "refill")
        }
        shown = ", ".join(f"{k} {v}" for k, v in constants.items() if v not in (None, "none", False))
        cells = (f"`{name}`", row.formula, parts, shown, f"[`{row.term}`]({FUNCTIONS})", row.use, row.reference)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    before, rest = text.split(START)
    return before + START + table() + STOP + rest.split(STOP)[1]


if __name__ == "__main__":
    DOC.write_text(written(DOC.read_text(encoding="utf-8")), encoding="utf-8")
