"""Turn a sweep file into a plan. The config of every cell is built and checked before anything starts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from solera.config import Config, Place, check, overlay, perhaps, places, read_toml, typed_fields
from solera.errors import SoleraError
from solera.models.source import obtain
from solera.objectives.table import resolve_config
from solera.sweep.plan import Cell, MeasureName, Plan
from solera.tasks.rewards import check_data

NAME = r"[\w.=-]+"
"""Characters that a folder's name may have. `+` separates the choices of a cell."""
OWN_FIELDS = {
    "name": "each run is named after its cell and seed",
    "root": "set sweep.root",
    "seed": "set sweep.seeds",
}
"""Fields of [run] that the sweep sets, and what to do instead."""


@dataclass(frozen=True)
class SweepTable:
    """The table [sweep]."""

    name: str
    root: str = "sweeps"
    seeds: Any = 5
    measure: MeasureName = "final"
    baseline: Any = None
    exclude: Any = ()


CHECKED_HERE = ("seeds", "baseline", "exclude")
"""Fields of [sweep] without a simple type."""


@dataclass(frozen=True)
class SweepFile:
    """The parts of a sweep file. `axes` are nested tables: axis, choice, section, field."""

    path: Path
    text: str
    place: Place
    sweep: SweepTable
    axes: dict[str, dict[str, dict[str, Any]]]
    base: dict[str, Any]
    quick: dict[str, Any]


def read_plan(path: Path, quick: bool = False, *, to_run: bool = True) -> Plan:
    """Read a sweep file and return its plan. With `quick`, the file's table [quick] changes the plan. Unless it is
    `to_run`, the models and data that it names need not exist."""
    file = _read(path, quick)
    axes = _kept(file)
    exclude = _excluded(file)
    cells = []
    for choices in product(*axes.values()):
        named = dict(zip(axes, choices, strict=True))
        if not any(left_out.items() <= named.items() for left_out in exclude):
            cells.append(Cell(choices, _resolved(file, named, to_run)))
    _refuse_equal(file, cells)
    plan = Plan(
        path, file.sweep.name, Path(file.sweep.root) / file.sweep.name, axes, cells=tuple(cells),
        seeds=_seeds(file.sweep.seeds, file.place("quick" if "seeds" in file.quick else "sweep", "seeds")),
        measure=file.sweep.measure, baseline=_baseline(file, axes), text=file.text,
    )  # fmt: skip
    _check_runs(plan)
    return plan


def _check_runs(plan: Plan) -> None:
    """Check each run's name and seed. The rest of its config is that of its cell."""
    for run in plan.runs():
        try:
            check(run.config)
        except SoleraError as error:
            raise SoleraError(f"{plan.source}: cell {run.cell.name}, seed {run.seed}: {error}") from error


def _read(path: Path, quick: bool) -> SweepFile:
    text, tables = read_toml(path)
    place = places(text, str(path))
    for name in ("sweep", "axis", "quick"):
        if not isinstance(tables.setdefault(name, {}), dict):
            raise SoleraError(f"{place(name)}: {name} is a table: write [{name}] and its fields below")
    sweep, axes, quickly = (tables.pop(name) for name in ("sweep", "axis", "quick"))
    if quick and not quickly:
        raise SoleraError(f"{path}: has no table [quick], so --quick has nothing to change")
    for name, choices in axes.items():
        _check_axis(name, choices, place)
    if not axes:
        raise SoleraError(f"{path}: has no axis: write [axis.NAME] and its choices below, one per line")
    overrides = quickly if quick else {}
    settings = {"name": path.stem, **sweep, **({"seeds": quickly["seeds"]} if "seeds" in overrides else {})}
    table = _sweep_table(settings, place, "-quick" if quick else "")
    return SweepFile(path, text, place, table, axes, tables, overrides)


def _sweep_table(settings: dict[str, Any], place: Place, suffix: str) -> SweepTable:
    simple = {key: value for key, value in settings.items() if key not in CHECKED_HERE}
    composed = {key: value for key, value in settings.items() if key in CHECKED_HERE}
    values = typed_fields(SweepTable, "sweep", simple, place)
    if not re.fullmatch(NAME, values["name"]) or set(values["name"]) == {"."}:
        raise SoleraError(
            f"{place('sweep', 'name')}: sweep.name is {values['name']!r}; use letters, digits and . _ = -"
        )
    return SweepTable(**{**values, **composed, "name": values["name"] + suffix})


def _check_axis(name: str, choices: Any, place: Place) -> None:
    if not isinstance(choices, dict) or not choices:
        raise SoleraError(f"{place('axis', name)}: axis {name} has no choices: write one per line below [axis.{name}]")
    for choice, tables in choices.items():
        where = place("axis", name, choice)
        if not re.fullmatch(NAME, choice):
            raise SoleraError(f"{where}: axis {name}: choice {choice!r}; use letters, digits and . _ = -")
        if not isinstance(tables, dict):
            raise SoleraError(
                f"{where}: axis {name}, choice {choice}: write the fields it sets, such as {choice} = {{ "
                "sync.period = 20 }"
            )


def _kept(file: SweepFile) -> dict[str, tuple[str, ...]]:
    """The choices on each axis: all, or those that [quick] keeps."""
    keep = file.quick.get("keep", {})
    if not isinstance(keep, dict) or not all(isinstance(choices, list) and choices for choices in keep.values()):
        raise SoleraError(
            f"{file.place('quick', 'keep')}: quick.keep must be lists of choices by axis, such as {{ AXIS = [...] }}"
        )
    for axis, choices in keep.items():
        for choice in choices:
            _known(file, "quick.keep", axis, choice)
    return {axis: tuple(c for c in choices if c in keep.get(axis, choices)) for axis, choices in file.axes.items()}


def _excluded(file: SweepFile) -> list[dict[str, str]]:
    exclude = file.sweep.exclude
    if not isinstance(exclude, list | tuple) or not all(
        isinstance(left_out, dict) and left_out for left_out in exclude
    ):
        raise SoleraError(
            f'{file.place("sweep", "exclude")}: sweep.exclude must be a list of cells, such as [{{ AXIS = "CHOICE" }}]'
        )
    for left_out in exclude:
        for axis, choice in left_out.items():
            _known(file, "sweep.exclude", axis, choice)
    return list(exclude)


def _baseline(file: SweepFile, axes: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Default: the first choice of the first axis."""
    baseline = file.sweep.baseline
    if baseline is None:
        axis, choices = next(iter(axes.items()))
        return {axis: choices[0]}
    if not isinstance(baseline, dict) or not baseline:
        raise SoleraError(
            f'{file.place("sweep", "baseline")}: sweep.baseline must be choices by axis, such as {{ AXIS = "CHOICE" }}'
        )
    for axis, choice in baseline.items():
        _known(file, "sweep.baseline", axis, choice)
        if choice not in axes[axis]:
            raise SoleraError(
                f"{file.place('quick', 'keep')}: quick.keep leaves out {choice}, but sweep.baseline uses it"
            )
    return baseline


def _known(file: SweepFile, field: str, axis: str, choice: Any) -> None:
    where = file.place(*field.split("."))
    if axis not in file.axes:
        raise SoleraError(f"{where}: {field} names the axis {axis!r}{perhaps(axis, file.axes)}")
    if not isinstance(choice, str) or choice not in file.axes[axis]:
        raise SoleraError(
            f"{where}: {field}: {choice!r} is not on the axis {axis}{perhaps(str(choice), file.axes[axis])}"
        )


def _seeds(seeds: Any, where: str) -> tuple[int, ...]:
    """A number n means the seeds 0 … n−1."""
    if type(seeds) is int and seeds > 0:
        return tuple(range(seeds))
    if isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds):
        if len(set(seeds)) == len(seeds):
            return tuple(seeds)
        raise SoleraError(f"{where}: seeds is {seeds}: one of them is listed twice")
    raise SoleraError(f"{where}: seeds is {seeds!r} but must be a number of seeds, or a list of whole numbers from 0")


def _layers(file: SweepFile, named: dict[str, str]) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Yield the layers of a cell's config. Later layers override earlier ones. Each is a description, the place in the
    file, and the tables."""
    yield "", (), file.base
    for axis, choice in named.items():
        yield f"axis {axis}, choice {choice}: ", ("axis", axis, choice), file.axes[axis][choice]
    sections = {name: table for name, table in file.quick.items() if name not in ("seeds", "keep")}
    yield "quick: ", ("quick",), sections


def _resolved(file: SweepFile, named: dict[str, str], to_run: bool) -> Config:
    """The config of a cell. If it is `to_run`, it is fully checked, so that nothing is refused when its runs start."""
    config = Config()
    setters: dict[tuple[str, str], str] = {}
    for words, path, tables in _layers(file, named):
        where = _placing(file.place, path, words)
        config = overlay(config, tables, where)
        for section, table in tables.items():
            for field in table:
                _refuse_twice_or_own(section, field, path, where, setters)
    try:
        config = resolve_config(config)
        if to_run:
            obtain(config.model.path)
            check_data(config)
    except SoleraError as error:
        cell = ", ".join(f"{axis} {choice}" for axis, choice in named.items())
        raise SoleraError(f"{_blamed(file, named, str(error))}: cell {cell}: {error}") from error
    return config


def _placing(place: Place, path: tuple[str, ...], words: str) -> Place:
    def where(*field: str) -> str:
        return f"{place(*path, *field)}: {words}".removesuffix(": ")

    return where


def _refuse_twice_or_own(
    section: str, field: str, path: tuple[str, ...], where: Place, setters: dict[tuple[str, str], str]
) -> None:
    """Refuse a field that two axes set, because the result would depend on their order, and fields that the sweep
    sets."""
    if section == "run" and field in OWN_FIELDS:
        raise SoleraError(f"{where(section, field)}: run.{field} is set by the sweep: remove it ({OWN_FIELDS[field]})")
    if path[:1] == ("axis",):
        axis = path[1]
        if setters.setdefault((section, field), axis) != axis:
            raise SoleraError(
                f"{where(section, field)}: {section}.{field} is also set on the axis {setters[section, field]}: "
                "set it on one of them"
            )


def _blamed(file: SweepFile, named: dict[str, str], complaint: str) -> str:
    """Return the place in the file where the field that the error names was last set. If nothing sets it, return the
    place of the cell's first choice."""
    first = re.match(r"(\w+)\.(\w+)", complaint)
    if first:
        for _, path, tables in reversed(list(_layers(file, named))):
            if first[2] in tables.get(first[1], {}):
                return file.place(*path, first[1], first[2])
    axis, choice = next(iter(named.items()))
    return file.place("axis", axis, choice)


def _refuse_equal(file: SweepFile, cells: list[Cell]) -> None:
    if not cells:
        raise SoleraError(f"{file.place('sweep', 'exclude')}: sweep.exclude leaves no cell")
    seen: dict[Config, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.config, cell)) != cell:
            raise SoleraError(
                f"{file.path}: the cells {other.name} and {cell.name} have the same config: remove one of them"
            )
