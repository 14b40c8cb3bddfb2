"""Problems from a file with one JSON object per line: a prompt and any other columns.

The whole file is checked strictly before a run begins. Every error names file, line and field.
"""

import json
import sys
import unicodedata
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from solera.config import TaskConfig, task_parts
from solera.errors import SoleraError, counted, kind_of
from solera.folder.beginning import digest_of
from solera.protocols import Codec
from solera.records import Prompt
from solera.tasks.graders import COMPARING, answer_of
from solera.tasks.prompting import Wording, encode_all, refuse_unknown, text_of, word_prompt
from solera.tasks.sources import Lines, find_splits, one_split

CANONICAL = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True)
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class DatasetRow:
    """One line: its place, its content, and digests of it. Equal rows share `key`."""

    place: str
    data: dict[str, Any]
    key: str
    prompt_digest: bytes


class Jsonl:
    """The problems of a file. Every epoch shows all training rows once, in a new order."""

    def __init__(
        self,
        task: TaskConfig,
        codec: Codec,
        seed: int,
        longest: int | None = None,
        graders: frozenset[str] = frozenset(),
    ) -> None:
        """`longest` is the maximum number of tokens in a prompt; `graders` are those that use the answer column."""
        assert task.prompt is not None
        self._seed = seed
        training, held_out = read_split(task, graders)
        self._training = _encode(training, task, codec, longest)
        self._held_out = _encode(held_out, task, codec, longest)
        rows = training + held_out
        self._places = {row.key: row.place for row in reversed(rows)}
        self.columns = columns_of(rows)

    def prompt(self, index: int) -> Prompt:
        if not self._training:
            raise SoleraError(
                "task.path is unset, so there is nothing to train on: name a file, a folder or a hub name"
            )
        epoch, place = divmod(index, len(self._training))
        return _prompt(*self._training[shuffled(self._seed, epoch, len(self._training))[place]])

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` different held-out rows, the same in every run, whatever the order of the file."""
        distinct = {row.key: (row, ids) for row, ids in self._held_out}
        return [_prompt(*distinct[key]) for key in sorted(distinct)[:count]]

    def place(self, prompt: Prompt) -> str:
        return self._places[prompt.key]


def every_prompt(task: TaskConfig, codec: Codec, longest: int | None, held_out: bool) -> list[Prompt]:
    """Yield each training row once, in the order of the file, or each held-out row. Answers are not checked."""
    rows = split_rows(task)[1 if held_out else 0]
    return [_prompt(row, ids) for row, ids in _encode(rows, task, codec, longest)]


def _encode(
    rows: list[DatasetRow], task: TaskConfig, codec: Codec, longest: int | None
) -> list[tuple[DatasetRow, np.ndarray]]:
    """The rows with the tokens of their prompts, which are encoded together."""
    assert task.prompt is not None
    wordings, encoded = list[Wording](), list[tuple[DatasetRow, np.ndarray]]()
    try:
        for row in rows:
            wordings.append(word_prompt(codec, task.template, row.data[task.prompt]))
        for row, wording, ids in zip(rows, wordings, encode_all(codec, wordings), strict=True):
            refuse_unknown(codec, ids, wording.problem)
            _refuse_length(len(ids), longest)
            encoded.append((row, np.array(ids, np.int32)))
    except SoleraError as error:
        raise SoleraError(f"{row.place}: field {task.prompt!r} {error}") from error
    return encoded


def _refuse_length(tokens: int, longest: int | None) -> None:
    if not tokens:
        raise SoleraError("has no tokens: the model needs a prompt to start from")
    if longest is not None and tokens > longest:
        raise SoleraError(
            f"has {tokens} tokens; with sampling.max_tokens the model has room for {longest}: shorten it, or lower "
            "sampling.max_tokens"
        )


def columns_of(rows: list[DatasetRow]) -> frozenset[str]:
    return frozenset(column for row in rows for column in row.data)


def normal(text: str) -> str:
    """The text by which problems are compared: without differences in white space, capitals and Unicode composition.

    >>> normal("  How many\\nApples? ") == normal("how many apples?")
    True
    """
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _prompt(row: DatasetRow, ids: np.ndarray) -> Prompt:
    return Prompt(row.key, tuple(ids.tolist()), row.data)


@lru_cache(maxsize=4)
def shuffled(seed: int, epoch: int, count: int) -> list[int]:
    """The order of `count` rows in an epoch."""
    order = list(range(count))
    Random(seed << 40 | epoch).shuffle(order)
    return order


def read_split(task: TaskConfig, graders: frozenset[str]) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """Return training rows and held-out rows; refuse if either is empty, because training needs both."""
    training, held_out = split_rows(task, graders)
    if not held_out:
        raise SoleraError(
            f"{task.path}: task.held_out_share = {task.held_out_share} holds out none of its "
            f"{counted(len({row.prompt_digest for row in training}), 'different prompt')}: raise it, or give "
            "task.held_out_path"
        )
    if not training and (count := _count(task)):
        by_share = task.held_out_path is None and "test" not in find_splits(str(task.path))
        remedy = f"lower task.held_out_share = {task.held_out_share}, or add rows" if by_share else "add other rows"
        raise SoleraError(
            f"{task.path}: nothing is left to train on: all of its {count} rows have prompts that are held out: "
            f"{remedy}"
        )
    return training, held_out


def row_digests(task: TaskConfig) -> dict[str, str]:
    """For each file of the task, a digest of its training rows."""
    return {
        part.path: digest_of(row.key for row in read_split(part, frozenset())[0])
        for part in task_parts(task).values()
        if part.prompt is not None and part.path is not None
    }


def _count(task: TaskConfig) -> int:
    """Rows that would be trained on if none were held out."""
    assert task.prompt is not None
    return len(_rows(find_splits(task.path).get("train", []), task.prompt)) if task.path is not None else 0


def split_rows(task: TaskConfig, graders: frozenset[str] = frozenset()) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """Split rows into training and held-out ones, with no prompt on both sides. This needs no tokenizer.

    Without a separate held-out file, a hash of the prompt decides. So duplicates, and lines added later, never change
    sides. A training row whose prompt differs from a held-out one only in white space or capitals is left out, too.
    """
    assert task.prompt is not None and task.answer is not None
    splits = find_splits(task.path) if task.path is not None else {}
    rows = _rows(splits.get("train", []), task.prompt)
    if task.held_out_path is not None:
        held_out = _rows(one_split(task.held_out_path, "test"), task.prompt)
    elif "test" in splits:
        held_out = _rows(splits["test"], task.prompt)
    else:
        assert task.held_out_share is not None
        limit = task.held_out_share * 2**64
        held_out = [row for row in rows if int.from_bytes(row.prompt_digest) < limit]
    rows, held_out = [_answered(row, task) for row in rows], [_answered(row, task) for row in held_out]
    for row in rows + held_out if graders & COMPARING else ():
        _check_answer(row, task.answer, graders & COMPARING)
    shown = {normal(text_of(row.data[task.prompt])) for row in held_out}
    return [row for row in rows if normal(text_of(row.data[task.prompt])) not in shown], held_out


def _answered(row: DatasetRow, task: TaskConfig) -> DatasetRow:
    """Return the row with an answer column. MATH's rows, and some of AIME, have the answer only in a box in the
    solution."""
    if task.name != "math" or task.answer in row.data or "solution" not in row.data:
        return row
    return replace(row, data={**row.data, str(task.answer): row.data["solution"]})


def _rows(lines: Lines, prompt: str) -> list[DatasetRow]:
    return read(lines, prompt) if isinstance(lines, str) else [make_row(line, at, prompt) for at, line in lines]


def read(path: str, prompt: str) -> list[DatasetRow]:
    """Return every row of a file; blank lines are skipped. An unchanged file is not read again."""
    try:
        status = Path(path).stat()
        return _read(path, prompt, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise SoleraError(f"{path}: cannot be read: {error.strerror}") from error


@lru_cache(maxsize=8)
def _read(path: str, prompt: str, _changed: int, _size: int) -> list[DatasetRow]:
    with open(path, "rb") as file:
        rows = [make_row(line, f"{path}:{number}", prompt) for number, line in enumerate(file, 1) if line.strip()]
    if not rows:
        raise SoleraError(f"{path}:1: the file is empty: it needs one JSON object per line")
    return rows


def make_row(line: bytes, place: str, prompt: str) -> DatasetRow:
    """Parse a line of JSON into a row, or raise an error with its place."""
    data = read_object(line, place)
    if prompt not in data:
        known = ", ".join(map(repr, data)) or "none"
        raise SoleraError(
            f"{place}: field {prompt!r} is missing; the fields are {known} (set task.prompt to the column "
            "with the prompt)"
        )
    columns = {}
    for column, value in data.items():
        try:
            if column == prompt:
                check_prompt(value)
            columns[column] = canonical([column, value])
        except SoleraError as error:
            raise SoleraError(f"{place}: field {column!r} {error}") from None
    content = blake2b(b"".join(sorted(columns.values())), digest_size=12).hexdigest()
    return DatasetRow(place, data, f"jsonl/{content}", _digest(columns[prompt]))


def prompt_digest(column: str, prompt: Any) -> bytes:
    """Equal for equal prompts, whatever the other columns are."""
    return _digest(canonical([column, prompt]))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=8).digest()


def read_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_repetition)
    except UnicodeDecodeError as error:
        raise SoleraError(f"{place}: not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        said = error.msg.removesuffix(" at")  # as "Unterminated string starting at" ends
        raise SoleraError(f"{place}: not JSON: {said} at character {error.pos + 1}") from error
    except RecursionError:
        raise SoleraError(f"{place}: nested too deeply") from None
    except SoleraError as error:
        raise SoleraError(f"{place}: {error}") from None
    except ValueError as error:  # Python's own message, about digits
        most = sys.get_int_max_str_digits()
        raise SoleraError(
            f"{place}: a whole number has more than {most:,} digits: write it as text, in quotes"
        ) from error
    if not isinstance(data, dict):
        raise SoleraError(f'{place}: not a JSON object but {kind_of(data)}: write {{"prompt": …}}')
    return data


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise SoleraError(f"field {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return data


def check_prompt(prompt: Any) -> None:
    """Check a prompt: text, or chat messages that end where the policy answers. Error messages continue after the name
    of the field."""
    if isinstance(prompt, str):
        if not prompt:
            raise SoleraError("is empty")
        return
    if not isinstance(prompt, list):
        raise SoleraError(f"is {kind_of(prompt)}, but must be text or a list of chat messages")
    if not prompt:
        raise SoleraError("is an empty list of chat messages")
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict):
            raise SoleraError(f"message {number} is {kind_of(message)}, but must be an object with role and content")
        if message.get("role") not in ROLES:
            raise SoleraError(
                f"message {number}: role is {_shown(message, 'role')}, but must be one of {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise SoleraError(f"message {number}: content is {_shown(message, 'content')}, but must be text")
    if prompt[-1]["role"] not in ("user", "tool"):
        raise SoleraError(f"ends with the {prompt[-1]['role']}'s message: the last must be the user's or a tool's")


def _check_answer(row: DatasetRow, column: str, graders: frozenset[str]) -> None:
    field = f"{row.place}: field {column!r}"
    if column not in row.data:
        raise SoleraError(
            f"{field} is missing, but the grader {', '.join(sorted(graders))} needs it (task.answer sets the column)"
        )
    try:
        answer_of(row.data[column], graders)
    except SoleraError as error:
        raise SoleraError(f"{field} {error}") from None


def canonical(value: Any) -> bytes:
    try:
        return CANONICAL.encode(value).encode()
    except UnicodeEncodeError:
        raise SoleraError("holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise SoleraError("is nested too deeply") from None
    except ValueError:
        raise SoleraError("holds a number that is not finite (NaN, or beyond what a float can hold)") from None


def _shown(message: dict[str, Any], field: str) -> str:
    return repr(message[field])[:80] if field in message else "missing"
