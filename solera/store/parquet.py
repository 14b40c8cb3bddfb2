"""Read and write rows of Parquet files. Only this module uses pyarrow."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from solera.errors import SoleraError, one_line

TOGETHER = 1_000
"""Rows in memory while a file is read or written."""


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def read_rows(path: Path) -> Iterator[bytes]:
    """Each row as a line of JSON. Parquet fills missing fields with null; these are left out."""
    pyarrow = _pyarrow()
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(TOGETHER):
            for row in batch.to_pylist():
                yield json.dumps(_without_nulls(row), default=_refuse, ensure_ascii=False).encode(errors="replace")
    except pyarrow.ArrowException as error:
        raise SoleraError(f"{path}: cannot be read as Parquet: {one_line(error)}") from error


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write the output of `store/lines.py`, one rollout per row. Returns how many."""
    pyarrow, rest, count = _pyarrow(), iter(rows), 0
    schema = _schema(pyarrow)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while some := list(islice(rest, TOGETHER)):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(some, schema))
            count += len(some)
    return count


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise SoleraError("Parquet needs the package pyarrow: pip install 'solera[parquet]'") from error
    return pyarrow


def _schema(pa: Any) -> Any:
    sampling = pa.struct([("temperature", pa.float64()), ("max_tokens", pa.int64()), ("top_p", pa.float64())])
    reward = [("value", pa.float64()), ("part", pa.string()), ("source", pa.string()), ("revision", pa.int64()),
              ("position", pa.int64()), ("sequence", pa.int64())]  # fmt: skip
    segment = [("author", pa.string()), ("tokens", pa.int64()), ("calls", pa.int64()), ("failed", pa.int64())]
    sequence = [("ids", pa.list_(pa.int32())), ("spans", pa.list_(pa.list_(pa.int32()))),
                ("logp", pa.list_(pa.float32())), ("temperatures", pa.list_(pa.float64())),
                ("segments", pa.list_(pa.struct(segment)))]  # fmt: skip
    return pa.schema([
        ("id", pa.int64()), ("key", pa.string()), ("origin", pa.string()), ("lineage", pa.string()),
        ("finish_reason", pa.string()), ("created", pa.float64()), ("text", pa.string()), ("sampling", sampling),
        ("rewards", pa.list_(pa.struct(reward))), ("sequences", pa.list_(pa.struct(sequence))),
        ("prompt", pa.string()), ("response", pa.string()),
    ])  # fmt: skip


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(held) for name, held in value.items() if held is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _refuse(value: Any) -> str:
    """A value that JSON cannot express, such as a date or bytes, becomes text that names it, and is refused later with
    its place."""
    return f"<{type(value).__name__}>"
