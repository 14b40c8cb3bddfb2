"""One self-contained page about one or several runs: it works from a file, and asks no network for anything."""

import dataclasses
import json
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from solera.errors import SoleraError
from solera.files import write_whole
from solera.report.groups import GROUPS, sample_groups
from solera.report.panels import panels_for
from solera.report.run_folder import RunFolder, read_run
from solera.report.summary import columns, main_figures, settings


def write_report(folders: list[Path], target: Path, groups: int = GROUPS) -> Path:
    """Write the page about these runs' folders, with up to `groups` groups of each run to look into."""
    if target.is_dir():
        raise SoleraError(f"{target}: is a folder; name the file to write, such as {target / 'report.html'}")
    distinct = {folder.resolve(): folder for folder in folders}
    return write_whole(target, render(_data([read_run(folder) for folder in distinct.values()], groups)))


def _data(runs: list[RunFolder], groups: int) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    shown = [_run(run, name, groups) for run, name in zip(runs, _names(runs), strict=True)]
    known, other = panels_for(metric for run in shown for metric in run["metrics"])
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": shown,
        "panels": [dataclasses.asdict(panel) for panel in known],
        "other": [dataclasses.asdict(panel) for panel in other],
        "settings": settings(runs),
    }


def _run(run: RunFolder, name: str, groups: int) -> dict[str, Any]:
    parts = {**columns(run), **main_figures(run), "groups": sample_groups(run, groups)}
    return {"name": name, **parts, "notes": run.notes}


def _names(runs: list[RunFolder]) -> list[str]:
    """The folders' own names where these tell them apart, else the paths that were given."""
    names = [run.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def render(data: dict[str, Any]) -> str:
    """The page with its data inside. No text of a response can end the script it stands in: there is no `<` in it."""
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = part("page.html")
    for name, content in {
        "style": part("style.css"),
        "charts": part("charts.js"),
        "groups": part("groups.js"),
        "page": part("page.js"),
        "data": embedded,  # last: what stands in it is never taken for a place to fill
    }.items():
        page = page.replace(f"/* {name} */", content, 1)
    return page


def part(name: str) -> str:
    """A file of the page."""
    return (files("solera.report") / "page" / name).read_text(encoding="utf-8")
