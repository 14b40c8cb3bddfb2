"""Read a run's folder for a report. Uses what is there, and notes what is missing."""

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solera.config import LARGEST, DrawConfig, writes
from solera.config.reading import UNSET
from solera.config.secrets import HIDDEN, holds_password
from solera.errors import SoleraError
from solera.folder.beginning import read_beginning, read_own_code
from solera.folder.paths import CONFIG, METRICS, MODEL

MetricsRow = dict[str, float]


@dataclass(frozen=True)
class RunFolder:
    """Config and metrics of a run, and notes about what could not be read."""

    path: Path
    config: dict[str, dict[str, Any]]
    rows: list[MetricsRow]
    notes: list[str] = field(default_factory=list)
    own_code: tuple[str, ...] = ()
    """Parts that the user wrote. They are not in the config."""

    @property
    def finished(self) -> bool:
        return (self.path / MODEL).is_dir()

    def setting(self, section: str, name: str) -> Any:
        """A field of the config as written; `None` if it is unset or unknown."""
        return self.config.get(section, {}).get(name)

    @property
    def generates(self) -> bool:
        """Whether the run's policy generated anything. Only a run with an engine does."""
        draw = self.config.get("draw", {})
        policy, shares = draw.get("policy"), draw.get("shares")
        known = DrawConfig(policy or "fresh", shares=tuple(map(str, shares)) if isinstance(shares, list) else ())
        return writes(known)

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) for every step at which the metric was logged and is finite."""
        return [(row["step"], row[metric]) for row in self.rows if math.isfinite(row.get(metric, math.nan))]

    def total(self, metric: str) -> float:
        return sum(value for _, value in self.points(metric))


def read_run(path: Path) -> RunFolder:
    """Read what there is of a finished, running or killed run."""
    if not path.is_dir():
        raise SoleraError(f"{path}: no such folder; give the folder of a run, such as runs/NAME")
    if not (path / CONFIG).is_file() and not (path / METRICS).is_file():
        raise SoleraError(f"{path}: it has neither config.toml nor metrics.jsonl, so it is not a run's folder")
    notes: list[str] = []
    config, rows = read_settings(path / CONFIG, notes), _rows(path / METRICS, notes)
    _note_edits(path, config, notes)
    return RunFolder(path, _without_password(config), rows, notes, _own_code(path, notes))


def _without_password(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Remove passwords. An edited config, or one of an earlier version, may contain one; the page must not."""
    store = config.get("store", {})
    if not isinstance(url := store.get("url"), str) or not holds_password(url):
        return config
    return config | {"store": store | {"url": HIDDEN}}


def _note_edits(path: Path, config: dict[str, dict[str, Any]], notes: list[str]) -> None:
    """Add a note if the config was edited during the run. The page shows the settings of the last steps."""
    try:
        begun = read_beginning(path)
    except SoleraError as error:
        notes.append(f"{error}.")
        return
    if begun is not None and config:
        named = (name.partition(".") for name in begun.settings)
        given = {f"{section}.{name}": config.get(section, {}).get(name) for section, _, name in named}
        written = {name: UNSET if v is None else json.dumps(v, ensure_ascii=False) for name, v in given.items()}
        notes.extend(f"{sentence}. The settings shown are the last." for sentence in begun.edited(written))


def _own_code(path: Path, notes: list[str]) -> tuple[str, ...]:
    try:
        return tuple(read_own_code(path))
    except SoleraError as error:
        notes.append(f"{error}.")
        return ()


def read_settings(path: Path, notes: list[str]) -> dict[str, dict[str, Any]]:
    """The tables as written, without the checks of `config.load`, so that runs of other versions can be reported."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        notes.append("config.toml is missing: the settings are unknown.")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        notes.append(f"config.toml cannot be read: {error}.")
        return {}
    sections = {section: table for section, table in tables.items() if isinstance(table, dict)}
    return {section: {name: _plain(value) for name, value in table.items()} for section, table in sections.items()}


def _plain(value: Any) -> Any:
    """The value if JSON can express it, otherwise its text: TOML has dates and infinities."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _rows(path: Path, notes: list[str]) -> list[MetricsRow]:
    if not path.is_file():
        notes.append("metrics.jsonl is missing: there are no curves.")
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_row(line) for line in lines]
    damaged = [number for number, row in enumerate(rows, 1) if row is None and lines[number - 1].strip()]
    if damaged == [len(lines)]:
        notes.append(f"The last line of metrics.jsonl (line {len(lines)}) was cut off and is skipped.")
    elif damaged:
        notes.append(f"metrics.jsonl: {len(damaged)} damaged lines are skipped; the first is line {damaged[0]}.")
    found = sorted((row for row in rows if row is not None), key=lambda row: row["step"])
    if not found:
        notes.append("metrics.jsonl holds no step yet: there are no curves.")
    return found


def _row(line: str) -> MetricsRow | None:
    """Return the numbers of a line, or `None` if the line is not an object with a step."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or type(values.get("step")) is not int or abs(values["step"]) > LARGEST:
        return None
    return {name: _number(value) for name, value in values.items() if type(value) in (int, float)}


def _number(value: float) -> float:
    """Infinity for a whole number that is too large for a float."""
    try:
        float(value)
    except OverflowError:
        return math.inf
    return value
