"""Where metrics go: `metrics.jsonl`, TensorBoard, Weights & Biases. Heavy packages are imported only if chosen."""

import errno
import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solera.errors import SoleraError, counted, one_line
from solera.folder.files import refuse_gone
from solera.protocols import Metrics, Sink


class JsonLines:
    """`metrics.jsonl`: one object per step, written before the next step begins, so that a kill loses none."""

    def __init__(self, path: Path, start: int = 0) -> None:
        """Rows from step `start` on are removed, because a resumed run writes them again."""
        kept = [row for row in read_metrics(path) if row["step"] < start] if path.exists() else []
        replacement = path.with_name(f"{path.name}.new")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        replacement.replace(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        refuse_gone(self._path, os.fstat(self._file.fileno()))

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """An event file in the run's folder. The package's own writer is not used: its thread would print a traceback on a
    full disk."""

    def __init__(self, folder: Path, start: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}").open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        # Makes TensorBoard drop what earlier files hold from this step on.
        self._write(Event(step=start, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Metrics) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(self._event(step=step, summary=self._summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """A run in the user's project; needs the extra `wandb`."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(project=project, name=name, dir=str(folder), config=dict(config))
        except wandb.Error as error:  # no key, no network
            raise OSError(
                errno.EIO, f"report.wandb: {one_line(error)} (or set WANDB_MODE=offline)", str(folder)
            ) from error

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def need_wandb() -> None:
    """Refuse if the package is missing, before the run writes anything."""
    if importlib.util.find_spec("wandb") is None:
        raise SoleraError("report.wandb needs the package wandb: pip install wandb")


class TeeSink:
    """Passes everything to several sinks, in order."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every complete line of a `metrics.jsonl`. A line that a killed run left incomplete is skipped."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def missing_rows(path: Path, version: int) -> str | None:
    """A message if steps before `version` have no row. A run logs every step, so the file was damaged."""
    held = {row["step"] for row in read_metrics(path)} if path.exists() else set()
    lost = [step for step in range(version) if step not in held]
    if not lost:
        return None
    which = f"step {lost[0]}" if len(lost) == 1 else f"steps {lost[0]} to {lost[-1]}"
    return f"{path} is missing {counted(len(lost), 'row')} of {version} ({which}): the run continues without them"


def _row(line: bytes, place: str) -> dict[str, float]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise SoleraError(f"{place}: the line is damaged, not a JSON object with a step: remove it")
    return row
