"""Find the key that a task gives to a prompt from a file, so that imported and generated responses to the same prompt
can form one group."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from solera.config import TaskConfig, kind_of_task, task_parts
from solera.errors import SoleraError
from solera.tasks import countdown, gym
from solera.tasks.arithmetic import is_held_out
from solera.tasks.jsonl import normal, prompt_digest, split_rows
from solera.tasks.prompting import text_of

KeyOf = Callable[[Any], str]
"""From text or chat messages to a key. Error messages continue after the name of the field."""
OWN = "text/"
"""Prefix of the keys of prompts that no task knows."""
HELD_OUT = "is one of the task's held-out problems, which are never trained on"


class HeldOutError(SoleraError):
    """A response to a held-out problem of the task."""


def keys_of(task: TaskConfig) -> KeyOf:
    """The keys of a resolved task. A prompt that the task does not know gets its own key; a held-out prompt is
    refused."""
    if task.prompt is not None:
        return _keys_of_jsonl(task)
    kinds: dict[str, KeyOf] = {
        "gym": _key_of_gym, "countdown": _key_of_countdown, "arithmetic": _key_of_arithmetic,
        "own": partial(_own_key, "prompt"),
    }  # fmt: skip
    return _keys_of_mixture(task) if task.name == "mixture" else kinds[kind_of_task(task.name)]


def _keys_of_mixture(task: TaskConfig) -> KeyOf:
    parts = {name: keys_of(part) for name, part in task_parts(task).items()}
    sure = {name: key for name, key in parts.items() if key is not _key_of_gym}

    def key_of(prompt: Any) -> str:
        """Every part may refuse a prompt. gym, which has only a hash of the text, refuses only prompts that no other
        part knows."""
        keys = {name: part(prompt) for name, part in sure.items()}
        known = next((f"{name}/{key}" for name, key in keys.items() if not key.startswith(OWN)), None)
        if known is None and len(sure) < len(parts):
            return _key_of_gym(prompt)
        return known or _own_key("prompt", prompt)

    return key_of


def _key_of_gym(prompt: Any) -> str:
    if isinstance(prompt, str) and gym.is_held_out(prompt):
        raise HeldOutError(HELD_OUT)
    return _own_key("prompt", prompt)


def _key_of_countdown(prompt: Any) -> str:
    problem = countdown.problem_in(prompt) if isinstance(prompt, str) else None
    if problem is None:
        return _own_key("prompt", prompt)
    if countdown.is_held_out(problem):
        raise HeldOutError(HELD_OUT)
    return f"countdown/{problem}"


def _key_of_arithmetic(prompt: Any) -> str:
    numbers = sum_in(prompt) if isinstance(prompt, str) else None
    if numbers is None:
        return _own_key("prompt", prompt)
    if is_held_out(*numbers):
        raise HeldOutError(HELD_OUT)
    return f"arithmetic/{prompt}"


def sum_in(text: str) -> tuple[int, int] | None:
    """The two numbers of the sum that a prompt asks for.

    >>> sum_in("37+45=")
    (37, 45)
    """
    match = re.fullmatch(r"([0-9]{1,9})\+([0-9]{1,9})=", text)
    return (int(match[1]), int(match[2])) if match else None


def _keys_of_jsonl(task: TaskConfig) -> KeyOf:
    column = task.prompt
    assert column is not None
    training, held_out = split_rows(task)
    keys = {row.prompt_digest: row.key for row in reversed(training)}
    kept_apart = {normal(text_of(row.data[column])) for row in held_out}

    def key_of(prompt: Any) -> str:
        if normal(text_of(prompt)) in kept_apart:
            raise HeldOutError(HELD_OUT)
        return keys.get(prompt_digest(column, prompt)) or _own_key(column, prompt)

    return key_of


def _own_key(column: str, prompt: Any) -> str:
    return f"{OWN}{prompt_digest(column, prompt).hex()}"
