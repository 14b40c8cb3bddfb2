"""The plan of a sweep: the cells of a grid, each run once per seed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from solera.config import Config, override
from solera.errors import SoleraError

MeasureName = Literal["final", "best", "mean"]


@dataclass(frozen=True)
class Cell:
    """One choice per axis, and the resolved config that results."""

    choices: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        return "+".join(self.choices)

    @property
    def compared(self) -> str:
        """The choice on the first axis. These choices are compared with each other."""
        return self.choices[0]

    @property
    def circumstances(self) -> tuple[str, ...]:
        """The choices on the other axes: the conditions of the comparison."""
        return self.choices[1:]


@dataclass(frozen=True)
class PlannedRun:
    """A cell with one seed, and the folder of its run."""

    cell: Cell
    seed: int
    config: Config

    @property
    def name(self) -> str:
        assert self.config.run.name is not None
        return self.config.run.name

    @property
    def folder(self) -> Path:
        return Path(self.config.run.root) / self.name


@dataclass(frozen=True)
class Plan:
    """A sweep file that was read and checked."""

    source: Path
    name: str
    folder: Path
    axes: dict[str, tuple[str, ...]]
    """Each axis with its remaining choices."""
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    measure: MeasureName
    """The measure by which cells are ranked and compared."""
    baseline: dict[str, str]
    text: str
    """The file's text when it was read."""

    def runs(self) -> list[PlannedRun]:
        """Ordered by seed, so that the finished runs of a stopped sweep can be compared."""
        return [self._run(cell, seed) for seed in self.seeds for cell in self.cells]

    def only(self, wanted: list[str]) -> list[PlannedRun]:
        """The runs of the cells with the wanted choices (`AXIS=CHOICE`). Several choices on one axis are
        alternatives."""
        choices: dict[str, set[str]] = {}
        for one in wanted:
            axis, _, choice = one.partition("=")
            if choice not in self.axes.get(axis, ()):
                known = ", ".join(f"{axis}={choice}" for axis, on_it in self.axes.items() for choice in on_it)
                raise SoleraError(f"--only {one}: {self.source} has {known}")
            choices.setdefault(axis, set()).add(choice)
        runs = [run for run in self.runs() if self._takes(run.cell, choices)]
        if not runs:
            raise SoleraError(f"--only {' --only '.join(wanted)}: {self.source} excludes all such cells")
        return runs

    def _takes(self, cell: Cell, choices: dict[str, set[str]]) -> bool:
        return all(own in choices.get(axis, {own}) for axis, own in zip(self.axes, cell.choices, strict=True))

    def counterpart(self, cell: Cell) -> Cell | None:
        """The cell that this one is compared with: the same cell with the baseline's choices."""
        choices = tuple(self.baseline.get(axis, choice) for axis, choice in zip(self.axes, cell.choices, strict=True))
        return next((other for other in self.cells if other.choices == choices and other != cell), None)

    def panels(self) -> dict[str, list[Cell]]:
        """The cells of each combination of conditions, under its title; a single panel if there is only one axis."""
        panels: dict[str, list[Cell]] = {}
        for cell in self.cells:
            pairs = zip(list(self.axes)[1:], cell.circumstances, strict=True)
            panels.setdefault(", ".join(f"{axis} {choice}" for axis, choice in pairs) or "all", []).append(cell)
        return panels

    def _run(self, cell: Cell, seed: int) -> PlannedRun:
        root = str(self.folder / "runs")
        return PlannedRun(cell, seed, override(cell.config, "run", seed=seed, root=root, name=f"{cell.name}-s{seed}"))
