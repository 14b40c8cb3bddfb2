"""One self-contained page about one or more runs. It opens from a file and needs no network."""

import dataclasses
import json
import re
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from solera.errors import SoleraError
from solera.folder.files import write_whole
from solera.report.diagnosis import compared, diagnose
from solera.report.groups import GROUPS, sample_groups
from solera.report.panels import Panel, is_flat, panels_for
from solera.report.run_folder import RunFolder, read_run
from solera.report.summary import columns, main_figures, settings

UPLOT = "1.6.32"
"""Version of the chart library in page/vendor."""


def write_report(folders: list[Path], target: Path, groups: int = GROUPS) -> Path:
    """Write the page about these runs, with up to `groups` groups of each."""
    if target.is_dir():
        raise SoleraError(f"{target}: is a folder; give the file to write, such as {target / 'report.html'}")
    distinct = {folder.resolve(): folder for folder in folders}
    return write_whole(target, render(_data([read_run(folder) for folder in distinct.values()], groups)))


def _data(runs: list[RunFolder], groups: int) -> dict[str, Any]:
    """Everything that the page shows, as plain values."""
    shown = [_run(run, name, groups) for run, name in zip(runs, _names(runs), strict=True)]
    known, other = panels_for(metric for run in shown for metric in run["metrics"])
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "uplot": UPLOT,
        "compared": compared({run["name"]: read for run, read in zip(shown, runs, strict=True)}),
        "runs": shown,
        "panels": [_panel(panel, shown) for panel in known],
        "other": [_panel(panel, shown) for panel in other],
        "settings": settings(runs),
    }


def _panel(panel: Panel, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {**dataclasses.asdict(panel), "flat": is_flat(panel, [run["metrics"] for run in runs])}


def _run(run: RunFolder, name: str, groups: int) -> dict[str, Any]:
    diagnosed = dataclasses.asdict(diagnose(run))
    parts = {**columns(run), **main_figures(run), "diagnosis": diagnosed, "groups": sample_groups(run, groups)}
    return {"name": name, **parts, "notes": run.notes}


def _names(runs: list[RunFolder]) -> list[str]:
    """The folders' own names if they are distinct, otherwise the given paths."""
    names = [run.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def render(data: dict[str, Any]) -> str:
    """The report page with its data."""
    scripts = {name: part(f"{name}.js") for name in ("groups", "page")}
    return filled(part("page.html"), scripts, data)


def filled(page: str, parts: dict[str, str], data: dict[str, Any]) -> str:
    """Fill in a page with charts: insert the chart library, the style, the page's own parts and the data.

    The data contains no `<`, so the text of a response cannot end the script element that contains it.
    """
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    library = {"uplot_style": part("vendor/uPlot.min.css"), "uplot": _library()}
    own = {"style": part("style.css"), "charts": part("charts.js"), **parts, "data": embedded}
    contents = library | own
    return re.sub(r"/\* (\w+) \*/", lambda place: contents[place[1]], page)  # one pass: inserted text is not searched


def _library() -> str:
    """uPlot with its licence, which every copy must include."""
    return f"/*\n{part('vendor/uPlot.LICENSE')}*/\n{part('vendor/uPlot.iife.min.js')}"


def part(name: str) -> str:
    """A file of the page."""
    return (files("solera.report") / "page" / name).read_text(encoding="utf-8")
