"""The fields of the section `task` that each task uses, and the parts of a mixture."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from solera.config.fields import LARGEST, perhaps, shown
from solera.config.sections import TaskConfig
from solera.errors import SoleraError

DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
"""What the name of a file with problems ends with."""
_FILE_FIELDS: dict[str, Any] = {"path": None, "answer": "answer", "held_out_path": None, "held_out_share": 0.1}
TASK_FIELDS: dict[str, dict[str, Any]] = {
    "arithmetic": {"level": 2},
    "jsonl": {**_FILE_FIELDS, "prompt": "prompt", "template": None},
    "gsm8k": {
        **_FILE_FIELDS, "prompt": "question",
        "template": "{prompt}\nThink step by step, and end with a line that holds #### and the final number.",
    },
    "math": {
        **_FILE_FIELDS, "prompt": "problem",
        "template": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    },
    "countdown": {
        "level": 3,
        "template": "{prompt} Use each number exactly once, with + - * / and brackets. Write the expression between "
        "<answer> and </answer>.",
    },
    "gym": {"level": None, "template": "{prompt}\n\nAnswer (just the answer, nothing else):"},
    "mixture": {"parts": (), "weights": ()},
    "own": {},
}  # fmt: skip
"""The fields that each task uses, and their defaults."""
GYM, ENVIRONMENT, TEXTARENA, VERIFIERS = "gym:", "env:", "textarena:", "verifiers:"
SPELLED = {"gym": f"{GYM}NAME", "own": "file.py:Class"}
"""How to write the kinds of tasks that have no fixed name."""


def kind_of_task(name: str) -> str:
    """The row of TASK_FIELDS that a task's name belongs to.

    >>> kind_of_task("gym:gcd"), kind_of_task("math"), kind_of_task("tasks.py:TwoTries")
    ('gym', 'math', 'own')
    """
    if name.startswith(GYM):
        return "gym"
    return "own" if ":" in name else name


def resolve_task(task: TaskConfig) -> TaskConfig:
    """Fill unset fields with the task's defaults. Refuses fields that the task does not use."""
    kind = kind_of_task(task.name)
    if kind not in TASK_FIELDS or task.name in SPELLED:
        known = [SPELLED.get(name, name) for name in TASK_FIELDS]
        is_file = task.name.endswith(DATA_FILES)
        hint = f'; for the problems of a file: task.name = "jsonl", task.path = "{task.name}"' if is_file else ""
        raise SoleraError(f"task.name is {task.name!r}{hint or perhaps(task.name, known)}")
    own = TASK_FIELDS[kind] | ({"path": None} if task.name.startswith((ENVIRONMENT, VERIFIERS)) else {})
    unset = [key.name for key in dataclasses.fields(task) if getattr(task, key.name) in (None, ())]
    for key in dataclasses.fields(task):
        if key.name not in ("name", *own, *unset):
            owners = [name for name, fields in TASK_FIELDS.items() if key.name in fields]
            hint = f", or choose --task {SPELLED.get(owners[0], owners[0])}" if owners else ""
            raise SoleraError(f"task.{key.name} is not used by {task.name}: remove it{hint}")
    _check_task(task)
    chosen = {} if task.held_out_path is None else {"held_out_share": None}
    task = dataclasses.replace(task, **{key: value for key, value in (own | chosen).items() if key in unset})
    if task.template is not None and "{prompt}" not in task.template:
        raise SoleraError(f"task.template is {shown(task.template)}; it must contain {{prompt}} for the problem")
    task_parts(task)
    return task


def _check_task(task: TaskConfig) -> None:
    if task.name == "jsonl" and not task.path:
        raise SoleraError("task.path is unset; jsonl needs a file of problems: --task.path FILE.jsonl")
    if task.name in ("gsm8k", "math") and not (task.path or task.held_out_path):
        known = {"gsm8k": "openai/gsm8k:main", "math": "HuggingFaceH4/MATH-500"}[task.name]
        raise SoleraError(
            "task.path is unset: give a folder with train.jsonl and test.jsonl, a file, or a hub name such "
            f"as {known} (for evaluation only, set task.held_out_path)"
        )
    if task.held_out_path is not None and task.held_out_share is not None:
        raise SoleraError("task.held_out_path and task.held_out_share both set what is held out: choose one")
    lowest, highest = {"arithmetic": (1, 4), "countdown": (2, 6)}.get(task.name, (0, LARGEST))
    if task.level is not None and not lowest <= task.level <= highest:
        levels = f"levels {lowest} to {highest}" if highest < LARGEST else f"levels from {lowest}"
        raise SoleraError(f"task.level is {task.level}; {task.name} has {levels}")
    if task.name == "mixture" and not task.parts:
        raise SoleraError('task.parts is empty: list the tasks of the mixture, such as ["gsm8k=FOLDER", "gym:gcd@1"]')
    if task.weights and (len(task.weights) != len(task.parts) or not all(weight > 0 for weight in task.weights)):
        raise SoleraError(
            f"task.weights is {list(task.weights)} for {len(task.parts)} parts: give one number above 0 for each"
        )


def passing(task: TaskConfig) -> float:
    """The reward at which an attempt counts as correct. It is higher for reasoning-gym, which gives partly correct
    answers 0.5 and more.

    >>> passing(TaskConfig("arithmetic")), passing(TaskConfig("gym:gcd"))
    (0.5, 0.99)
    """
    return 0.99 if any(kind_of_task(part.name) == "gym" for part in task_parts(task).values()) else 0.5


def task_parts(task: TaskConfig) -> dict[str, TaskConfig]:
    """The resolved tasks of a mixture, by their names in it. For any other task, the task itself.

    >>> list(task_parts(TaskConfig("mixture", parts=("gym:gcd@1", "gsm8k=data/gsm8k", "math=HuggingFaceH4/MATH-500"))))
    ['gym:gcd@1', 'gsm8k', 'math MATH-500']
    """
    if task.name != "mixture":
        return {task.name: task}
    parts: dict[str, TaskConfig] = {}
    for text in task.parts:
        name, _, path = text.partition("=")
        base, at, level = name.partition("@")
        stem = Path(path).stem.partition(":")[0]
        label = name if not path or stem == base else f"{base} {stem}"
        if at and not re.fullmatch("[0-9]{1,3}", level):
            raise SoleraError(f"task.parts: {text}: after @ there must be a level, a whole number")
        if kind_of_task(base) == "own":
            raise SoleraError(f"task.parts: {text}: your own task cannot be part of a mixture")
        if base == "mixture" or label in parts:
            raise SoleraError(
                f"task.parts: {text}: {'a mixture cannot contain a mixture' if base == 'mixture' else 'listed twice'}"
            )
        try:
            parts[label] = resolve_task(TaskConfig(base, level=int(level) if at else None, path=path or None))
        except SoleraError as error:
            raise SoleraError(f"task.parts: {text}: {error}") from None
    return parts
