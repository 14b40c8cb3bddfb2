"""The state of each run of a sweep, read only from the sweep's folder, so that a sweep can continue after any end."""

import dataclasses
import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from solera.config import Config, load_resolved, parse
from solera.config.fields import shown_in
from solera.errors import SoleraError
from solera.folder.files import write_whole
from solera.folder.paths import CONFIG, LOCK, MODEL
from solera.sweep.plan import Plan, PlannedRun

RECORDS = "results"
"""Folder with one small file for each finished run."""
State = Literal["finished", "failed", "unfinished", "new"]


class Failures:
    """`failures.json`: why each failed run failed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "failures.json"
        self._reasons: dict[str, str] = self._read() if self._path.exists() else {}

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(reason, str) for reason in found.values()):
            raise SoleraError(f"{self._path}: the file is damaged: remove it, and failed runs are tried again")
        return found

    def get(self, run: PlannedRun) -> str | None:
        return self._reasons.get(run.name)

    def add(self, run: PlannedRun, reason: str) -> None:
        self._write({**self._reasons, run.name: reason})

    def forget(self, run: PlannedRun) -> None:
        if run.name in self._reasons:
            self._write({name: reason for name, reason in self._reasons.items() if name != run.name})

    def _write(self, reasons: dict[str, str]) -> None:
        self._reasons = reasons
        write_whole(self._path, json.dumps(reasons, indent=1, ensure_ascii=False) + "\n")


def record_file(plan_folder: Path, run: PlannedRun) -> Path:
    """The file with the results of a finished run. It is enough to count the run as finished on another machine."""
    return plan_folder / RECORDS / f"{run.name}.json"


def read_record(file: Path) -> dict[str, Any] | None:
    """The content of a record file, or `None` if there is none."""
    if not file.exists():
        return None
    try:
        record = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(file) from error
    kinds = {"measures": dict, "curve": list, "pace": dict | None, "config": str}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise damaged(file)
    return record


def damaged(file: Path) -> SoleraError:
    return SoleraError(f"{file}: the file is damaged: remove it, and the run starts again")


def state_of(plan: Plan, run: PlannedRun, failures: Failures) -> State:
    if (run.folder / MODEL).is_dir() or record_file(plan.folder, run).exists():
        return "finished"
    if failures.get(run) is not None:
        return "failed"
    return "unfinished" if run.folder.exists() else "new"


NO_PART_OF_A_RUN = (
    ("run", "root"), ("run", "threads"), ("run", "gpu_memory"), ("learn", "micro_batch_tokens"), ("learn", "graphs"),
    ("engine", "max_rows"), ("collect", "overlap"),
)  # fmt: skip
"""Fields that may differ: where a run is stored, its share of the machine, how its kernels are started, and when its
batches are generated."""


def refuse_changed(plan: Plan) -> None:
    """Refuse to continue if a run was made with another config than the sweep's file has now. The report would show
    the run under a wrong name."""
    for run in plan.runs():
        file = record_file(plan.folder, run)
        if (run.folder / CONFIG).exists():
            made, where = load_resolved(run.folder / CONFIG), run.folder
            remedy = f"remove that folder{f' and {file}' if file.exists() else ''}"
        elif (record := read_record(file)) is not None:
            made, where, remedy = _config_of(record, file), file, "remove that file"
        else:
            continue
        refuse_other(plan, run, made, where, remedy)


def _config_of(record: dict[str, Any], file: Path) -> Config:
    try:
        return parse(record["config"], str(file))
    except ValueError as error:  # not TOML
        raise damaged(file) from error


def refuse_other(plan: Plan, run: PlannedRun, made: Config, where: Path, remedy: str) -> None:
    """Refuse the config that a run was made with, `made`, unless the sweep's file still says the same."""
    for section in dataclasses.fields(made):
        before, now = getattr(made, section.name), getattr(run.config, section.name)
        for field in dataclasses.fields(before):
            was, is_now = getattr(before, field.name), getattr(now, field.name)
            if was != is_now and (section.name, field.name) not in NO_PART_OF_A_RUN:
                name = f"{section.name}.{field.name}"
                raise SoleraError(
                    f"{where} was created with {name} = {shown_in(name, was)}, but {plan.source} "
                    f"now has {shown_in(name, is_now)}: choose another sweep.name, or {remedy}"
                )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a second sweep in the folder, and a sweep while runs of a killed one are still active."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SoleraError(
                f"{folder}: another `solera sweep` is using this folder, or runs of a killed one are still "
                "finishing: wait for them"
            ) from None
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Lock held by every run of the sweep."""
    with (folder / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
