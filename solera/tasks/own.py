"""The user's own task: find it by name, create it with the model's codec, and report its mistakes in one line."""

import inspect
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from solera.config.tasks import ENVIRONMENT, TEXTARENA, VERIFIERS
from solera.errors import SoleraError, one_line
from solera.protocols import Codec, Generate, Task
from solera.records import Prompt, Reward, Rollout
from solera.tasks.environments import EnvironmentTask, environment_rows
from solera.tasks.functions import check_file, is_spec, load_module, where
from solera.tasks.textarena_games import textarena_task
from solera.tasks.verifiers_task import VerifiersTask
from solera.values import kind

METHODS = {"prompt": "prompt(index)", "held_out": "held_out(count)", "run": "async run(prompt, generate)"}
"""Methods of a task."""
TaskFactory = Callable[[Codec], Task]


class Regrade(Protocol):
    """Returns the rewards of a rollout in addition to those that its task gave."""

    async def __call__(self, prompt: Prompt, rollout: Rollout) -> tuple[Reward, ...]: ...


def check_task(spec: str) -> None:
    """Refuse what cannot name a task, before anything is imported."""
    if spec.startswith((TEXTARENA, VERIFIERS)):
        return
    if not is_spec(spec.removeprefix(ENVIRONMENT)):
        raise SoleraError(
            f"task.name is {spec!r}; write your own task as file.py:Class or package.module:Class, and an environment "
            "as env:file.py:Class"
        )
    check_file(spec.removeprefix(ENVIRONMENT), "task.name")


def load_task(spec: str, path: str | None = None) -> TaskFactory:
    """Return the class, or function of a codec, that a spec names. `path` holds the rows of an environment."""
    check_task(spec)
    if spec.startswith(TEXTARENA):
        return partial(textarena_task, spec.removeprefix(TEXTARENA))
    if spec.startswith(VERIFIERS):
        return partial(VerifiersTask, spec.removeprefix(VERIFIERS), path)
    module, name = load_module(spec.removeprefix(ENVIRONMENT), "task.name"), spec.rpartition(":")[2]
    factory = getattr(module, name, None)
    if factory is not None and spec.startswith(ENVIRONMENT):
        return _environment(factory, spec, path)
    if factory is None:
        fits, what = (_resets, "environments") if spec.startswith(ENVIRONMENT) else (_is_task, "tasks")
        known = [key for key, value in vars(module).items() if inspect.isclass(value) and fits(value)]
        raise SoleraError(f"task.name: {spec}: {name} does not exist; {what} in the file: {', '.join(known) or 'none'}")
    if inspect.isclass(factory) and _resets(factory) and not _is_task(factory):
        raise SoleraError(f"task.name: {spec} is an environment, not a task: write {ENVIRONMENT}{spec}")
    return check_factory(factory, f"task.name: {spec}")


def _environment(environment: Any, spec: str, path: str | None) -> TaskFactory:
    if not callable(environment):
        raise SoleraError(f"task.name: {spec} must be a class or a function that returns an environment")

    rows, held_out = (None, None) if path is None else environment_rows(path)

    def make(codec: Codec) -> Task:
        return EnvironmentTask(codec, environment, rows, held_out)

    make.__name__ = environment.__name__
    make.__module__ = environment.__module__
    return make


def check_factory(factory: Any, what: str) -> TaskFactory:
    """Refuse what cannot create a task, as far as this can be checked without a codec. Error messages begin with
    `what`."""
    if not callable(factory):
        called = type(factory).__name__
        hint = f": give the class itself, {called}" if not missing_methods(factory) else ""
        raise SoleraError(f"{what} must be a class or a function that takes the codec, not an instance{hint}")
    if inspect.isclass(factory):
        check_methods(factory, f"{what}: {factory.__name__}")
    return factory


def _resets(environment: Any) -> bool:
    return callable(getattr(environment, "reset", None))


def _is_task(task: Any) -> bool:
    return not missing_methods(task)


def missing_methods(task: Any) -> list[str]:
    return [shown for name, shown in METHODS.items() if not callable(getattr(task, name, None))]


def check_methods(task: Any, what: str) -> None:
    """Refuse a task, or a task class, that lacks a method or whose `run` is not asynchronous."""
    if missing := missing_methods(task):
        raise SoleraError(
            f"{what} has no {' and no '.join(missing)}; a task has {', '.join(METHODS.values())} (docs/tasks.md)"
        )
    run = inspect.unwrap(task.run)
    if inspect.isroutine(run) and not inspect.iscoroutinefunction(run):
        raise SoleraError(f"{what}: run must be asynchronous: write `async def run(self, prompt, generate)`")


def make_task(factory: TaskFactory, codec: Codec) -> "OwnTask":
    """Create the task for a model's codec."""
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        task = factory(codec)
    except SoleraError:
        raise
    except Exception as error:
        raise SoleraError(f"task {name}: {name}(codec) raised {raised(error, factory)}") from error
    name = name if inspect.isclass(factory) else type(task).__name__
    check_methods(task, f"task {name}")
    return OwnTask(task, name, codec)


class OwnTask:
    """Wraps a user's Task. Its errors become one line that names the prompt, the method and the line in the file."""

    def __init__(self, task: Task, name: str, codec: Codec) -> None:
        self.task = task
        self.name = name
        self.codec = codec
        self.regrade: Regrade | None = None
        self.take_metrics: Callable[[], dict[str, float]] = dict
        """What the reward models of `regrade` did since the last call."""

    @property
    def columns(self) -> Set[str]:
        return frozenset(self._shown(self.prompt(0)).data)

    def place(self, prompt: Prompt) -> str:
        return f"prompt {prompt.key!r}"

    def prompt(self, index: int) -> Prompt:
        prompt = self._call("prompt", index)
        if not isinstance(prompt, Prompt):
            raise SoleraError(
                f"task {self.name}: prompt({index}) returned {kind(prompt)}; it must return a solera.Prompt"
            )
        return prompt

    def held_out(self, count: int) -> list[Prompt]:
        prompts = self._call("held_out", count)
        if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, Prompt) for prompt in prompts):
            raise SoleraError(f"task {self.name}: held_out({count}) must return a list of solera.Prompt")
        if not prompts:
            raise SoleraError(f"task {self.name}: held_out({count}) returned no problem; evaluation needs at least one")
        return list(prompts)

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        try:
            running = self.task.run(prompt, generate)
            if not inspect.isawaitable(running):
                raise SoleraError("run must be asynchronous: write `async def run(self, prompt, generate)`")
            rollout = await running
        except SoleraError as error:
            if repr(prompt.key) not in str(error):
                error.args = (f"prompt {prompt.key!r}: {self.name}.run: {error}",)
            raise
        except Exception as error:
            said = f"prompt {prompt.key!r}: {self.name}.run raised {raised(error, self.task)}"
            raise SoleraError(said) from error
        if self.regrade is None or not isinstance(rollout, Rollout):
            return rollout
        return replace(rollout, rewards=await self.regrade(self._shown(prompt), rollout))

    def _shown(self, prompt: Prompt) -> Prompt:
        """Add the text of the prompt to its columns, for reward functions."""
        if "prompt" in prompt.data:
            return prompt
        text = self.codec.decode(np.array(prompt.token_ids, np.int32))
        return replace(prompt, data={**prompt.data, "prompt": text})

    def _call(self, method: str, number: int) -> Any:
        try:
            return getattr(self.task, method)(number)
        except SoleraError as error:
            error.args = (f"task {self.name}: {method}({number}): {error}",)
            raise
        except Exception as error:
            said = f"task {self.name}: {method}({number}) raised {raised(error, self.task)}"
            raise SoleraError(said) from error


def raised(error: Exception, source: Any) -> str:
    """An error in a user's code, with the line of the file that defines `source`, an object or a class."""
    cls = source if inspect.isclass(source) or inspect.isroutine(source) else type(source)
    module = inspect.getmodule(cls)
    said = one_line(error) if str(error) else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{where(error, getattr(module, '__file__', None) or '')}"
