"""Environments: classes that hold the state of an episode, with tools as methods (as TRL has them) or with `step`."""

import inspect
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from solera.errors import SoleraError
from solera.protocols import Codec, Generate
from solera.records import Prompt, Reward, Rollout
from solera.tasks.agent import Agent
from solera.tasks.calls import TookTooLongError, call_each
from solera.tasks.conversation import Conversation, Limits, Message
from solera.tasks.jsonl import read_object, shuffled
from solera.tasks.sources import Lines, find_splits
from solera.tasks.tools import TIMEOUT, Tool, Toolbox, awaited, is_async
from solera.values import kind, shown, whole_characters

RESERVED = ("reset", "reward", "get_reward")
"""Methods of an environment that are no tools. A `close` without parameters is none either."""
TURNS = 10
"""Most turns of an episode, unless the environment has limits of its own."""
HELD_OUT_SHARE = 8
EPISODE = "solera_episode"
"""Where a prompt keeps the number and the first messages of its episode, beside the columns of its row."""
FIRST_HELD_OUT = 1 << 40
"""Number of the first held-out episode of an environment without rows."""
SEEDED = threading.Lock()
"""Held by whoever changes the state of Python's `random` and puts it back, in any thread."""

Rows = Sequence[Mapping[str, Any]]
Environment = Any
"""An object with `reset`, and with tools and a reward, or with `step`."""


class EnvironmentTask:
    """A task made of an environment class, or of a function that returns environments; each episode gets its own.

    With `rows`, an episode is about one of them: `reset(**row)` or, if `reset` takes one argument, `reset(row)`; its
    `prompt` column (text or messages) begins the conversation. One row in eight is held out, unless `held_out` has
    rows for evaluation. Without rows, `reset()` returns the first message. Python's `random` is seeded before `reset`,
    so that the members of a group get the same problem. A method `close` without parameters is called at the end. The
    class may have the attributes `limits` (a `Limits`), `timeout` (seconds of a call), `system` (a system message) and
    `template_kwargs`.
    """

    def __init__(
        self,
        codec: Codec,
        environment: Callable[[], Environment],
        rows: Rows | None = None,
        held_out: Rows | None = None,
        name: str | None = None,
    ) -> None:
        self.make = environment
        self.name = str(name or getattr(environment, "__name__", type(environment).__name__))
        example = environment()
        self.steps = _has_steps(example)
        _check(example, self.name, self.steps)
        self.timeout = getattr(example, "timeout", TIMEOUT)
        self.system = getattr(example, "system", None)
        self.agent = Agent(
            codec, [] if self.steps else tools_of(example), getattr(example, "limits", None) or Limits(turns=TURNS),
            **getattr(example, "template_kwargs", {}),
        )  # fmt: skip
        self.rows = None if rows is None else [dict(row) for row in (*rows, *(held_out or ()))]
        held = [
            _is_held_out(row) if held_out is None else n >= len(rows or ()) for n, row in enumerate(self.rows or ())
        ]
        self._training = [n for n, out in enumerate(held) if not out]
        self._held_out = [n for n, out in enumerate(held) if out]
        if self.rows is not None and not (self._training and self._held_out):
            raise SoleraError(f"environment {self.name}: {len(self.rows)} rows are too few to hold some out")

    def prompt(self, index: int) -> Prompt:
        if self.rows is None:
            return self._prompt(index)
        passes, place = divmod(index, len(self._training))
        return self._prompt(self._training[shuffled(0, passes, len(self._training))[place]])

    def held_out(self, count: int) -> list[Prompt]:
        numbers = self._held_out if self.rows is not None else range(FIRST_HELD_OUT, FIRST_HELD_OUT + count)
        return [self._prompt(number) for number in numbers[:count]]

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        number, messages = prompt.data[EPISODE]
        chat = self.agent.start(replace(prompt, data={"messages": messages}), generate)
        async with self._begun(number) as environment:
            if self.steps:
                rewards = await self._play(environment, chat)
            else:
                toolbox = Toolbox(tools_of(environment), self.timeout, one_by_one=True)
                while await self.agent.step(chat, toolbox):
                    pass
                rewards = [Reward(await self._reward(environment))]
        return chat.rollout(prompt, *rewards)

    async def _play(self, environment: Environment, chat: Conversation) -> list[Reward]:
        """Every turn of the policy is an action, and every observation a user message. The reward of a step belongs to
        its turn."""
        rewards, ended = list[Reward](), False
        while not ended and (turn := await chat.say()) is not None:
            observation, value, ended = _step(await self._call(environment.step, turn.text), self.name)
            rewards.append(chat.reward(value, f"turn_{len(rewards) + 1}"))
            if not ended:
                chat.add({"role": "user", "content": whole_characters(str(observation))})
        return rewards or [Reward(0.0)]

    async def _reward(self, environment: Environment) -> float:
        method = getattr(environment, "reward", None) or environment.get_reward
        value = await self._call(method)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise SoleraError(f"environment {self.name}: its reward is {shown(value)}; it must be a number") from None

    async def _call(self, method: Tool, *arguments: Any) -> Any:
        """Call a method in a thread, or await it; its error fails the episode."""
        if is_async(method):
            outcome = await awaited(partial(method, *arguments), self.timeout)
        else:
            async with aclosing(call_each(method, [(arguments, {})], self.timeout)) as outcomes:
                outcome = await anext(outcomes)
        if isinstance(outcome.error, TookTooLongError):
            called = getattr(method, "__name__", "a method")
            raise SoleraError(f"environment {self.name}: {called} took longer than timeout = {self.timeout:g} s")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _prompt(self, number: int) -> Prompt:
        row = {} if self.rows is None else self.rows[number]
        environment, began = self._begin(number)
        if close := _close_of(environment):
            close()
        messages = _messages(row.get("prompt"), began, self.name)
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        about = number if self.rows is None else blake2b(_canonical(row), digest_size=8).hexdigest()
        made = self.agent.prompt(f"{self.name}/{about}", messages)
        return replace(made, data={"number": number, **made.data, **row, EPISODE: (number, made.data["messages"])})

    @asynccontextmanager
    async def _begun(self, number: int) -> AsyncIterator[Environment]:
        """A new environment for an episode, closed at its end."""
        environment, _ = self._begin(number)
        try:
            yield environment
        finally:
            if close := _close_of(environment):
                await self._call(close)

    def _begin(self, number: int) -> tuple[Environment, Any]:
        """A new environment after its `reset`, and what `reset` returned."""
        environment, row = self.make(), {} if self.rows is None else self.rows[number]
        with SEEDED:
            state = random.getstate()
            random.seed(number)
            try:
                began = _reset(environment, row, number, self.steps)
            finally:
                random.setstate(state)
        if inspect.isawaitable(began):
            raise SoleraError(f"environment {self.name}: reset must not be asynchronous")
        return environment, began[0] if self.steps and isinstance(began, tuple) else began


def environment_rows(path: str) -> tuple[Rows, Rows | None]:
    """The rows of a file, and those for evaluation if there is a split `test`."""
    splits = {name: _rows(lines) for name, lines in find_splits(path).items()}
    training = splits.get("train") or next(iter(splits.values()))
    return training, splits.get("test") if "train" in splits else None


def _rows(lines: Lines) -> Rows:
    if not isinstance(lines, str):
        return [read_object(line, place) for place, line in lines]
    try:
        content = Path(lines).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise SoleraError(f"task.path: {lines}: cannot be read: {error.strerror}") from error
    rows = [read_object(line, f"{lines}:{number}") for number, line in enumerate(content, 1) if line.strip()]
    if not rows:
        raise SoleraError(f"task.path: {lines}: the file is empty: it needs one JSON object per line")
    return rows


def tools_of(environment: Environment) -> list[Tool]:
    """The public methods of an environment, except the reserved ones, in the order of their names."""
    methods, close = inspect.getmembers(environment, inspect.ismethod), _close_of(environment)
    return [
        method for name, method in methods
        if not name.startswith("_") and name not in RESERVED and method != close
    ]  # fmt: skip


def _close_of(environment: Environment) -> Callable[[], Any] | None:
    """Its method to free what it holds. With parameters, `close` is a tool, which closes a door, say."""
    close = getattr(environment, "close", None)
    return close if callable(close) and not inspect.signature(close).parameters else None


def _has_steps(environment: Environment) -> bool:
    scores = any(callable(getattr(environment, name, None)) for name in ("reward", "get_reward"))
    return callable(getattr(environment, "step", None)) and not scores


def _check(environment: Environment, name: str, steps: bool) -> None:
    if not callable(getattr(environment, "reset", None)):
        raise SoleraError(f"environment {name} has no method reset")
    if not steps and not any(callable(getattr(environment, each, None)) for each in ("reward", "get_reward")):
        raise SoleraError(f"environment {name} has no method reward() (or get_reward()), and no step(action)")
    if (close := _close_of(environment)) and is_async(close):
        raise SoleraError(f"environment {name}: close must not be asynchronous")


def _reset(environment: Environment, row: Mapping[str, Any], number: int, steps: bool) -> Any:
    parameters = inspect.signature(environment.reset).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if names == ["row"]:
        return environment.reset(row)
    given = dict(row) if everything else {key: value for key, value in row.items() if key in names}
    return environment.reset(**given, **({"seed": number} if steps and "seed" in names else {}))


def _messages(prompt: Any, observation: Any, name: str) -> list[Message]:
    """The first messages. An observation is added to the last one, as TRL does it."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
    if observation is None and messages:
        return messages
    if not isinstance(observation, str):
        what = (
            "returned nothing, and there is no column prompt"
            if observation is None
            else f"returned {kind(observation)}"
        )
        raise SoleraError(f"environment {name}: reset {what}; it must return the text of the first message")
    observation = whole_characters(observation)
    if not messages:
        return [{"role": "user", "content": observation}]
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + observation}]


def _step(result: Any, name: str) -> tuple[Any, float, bool]:
    """What `step` returned, in Gymnasium's form or in the older one of Gym."""
    if isinstance(result, tuple) and len(result) == 5:
        return result[0], float(result[1]), bool(result[2] or result[3])
    if isinstance(result, tuple) and len(result) in (3, 4):
        return result[0], float(result[1]), bool(result[2])
    raise SoleraError(
        f"environment {name}: step returned {kind(result)}; it must return (observation, reward, terminated, "
        "truncated, info)"
    )


def _is_held_out(row: Mapping[str, Any]) -> bool:
    return blake2b(_canonical(row), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def _canonical(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, sort_keys=True, default=str).encode()
