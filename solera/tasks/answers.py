"""Find the expected answer to a prompt by the prompt's key.

A key identifies one problem. For a row of a file, it is a digest of the row's content. So a row that was edited since
is not found, and no wrong answer is returned for it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from solera.config import DATA_FILES, TaskConfig, kind_of_task, task_parts
from solera.errors import SoleraError
from solera.tasks.gym import expected_answer
from solera.tasks.jsonl import read_split
from solera.tasks.keys import sum_in

AnswerOf = Callable[[str], str | None]
"""From a key to the answer; `None` for a prompt that the task does not know or that has no single answer."""


def answers_of(task: TaskConfig, folder: Path) -> AnswerOf:
    """Return the answers of a resolved task whose relative paths start in `folder`."""
    if task.name != "mixture":
        return _answers_of_one(task, folder)
    parts = {name: _answers_of_one(part, folder) for name, part in task_parts(task).items()}

    def answer(key: str) -> str | None:
        name, _, rest = key.partition("/")
        return parts[name](rest) if name in parts else None

    return answer


def _answers_of_one(task: TaskConfig, folder: Path) -> AnswerOf:
    if task.prompt is not None:
        return _answers_of_rows(task, folder)
    if (kind := kind_of_task(task.name)) == "own":
        return lambda key: None  # only the task's own code knows
    return {"gym": expected_answer, "countdown": _countdown, "arithmetic": _sum}[kind]


def _answers_of_rows(task: TaskConfig, folder: Path) -> AnswerOf:
    column = task.answer
    assert column is not None
    found = replace(task, path=_found(task.path, folder), held_out_path=_found(task.held_out_path, folder))
    rows, _ = read_split(found, frozenset())
    return {row.key: str(row.data[column]) for row in rows if row.data.get(column) is not None}.get


def _found(path: str | None, folder: Path) -> str | None:
    """Resolve a path from here. A missing path with a file extension is not taken for the name of a dataset."""
    if path is None:
        return None
    there = folder / Path(path).expanduser()
    if there.exists():
        return str(there)
    if there.suffix in DATA_FILES:
        raise SoleraError(f"{path}: the file no longer exists")
    return path


def _sum(key: str) -> str | None:
    """
    >>> _sum("arithmetic/37+45="), _sum("text/0a1b")
    ('82', None)
    """
    numbers = sum_in(key.removeprefix("arithmetic/"))
    return None if numbers is None else str(sum(numbers))


def _countdown(key: str) -> str | None:
    """Return the target. Many expressions reach it.

    >>> _countdown("countdown/3 5 7 = 26")
    '26 from 3, 5, 7'
    """
    name, _, problem = key.partition("/")
    numbers, _, target = problem.partition(" = ")
    return f"{target} from {numbers.replace(' ', ', ')}" if name == "countdown" and target else None
