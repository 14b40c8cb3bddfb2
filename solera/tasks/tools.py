"""Tools: plain Python functions that a policy may call. None of them can stop the run or block the engine."""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from solera.errors import SoleraError, one_line
from solera.tasks.calls import Outcome, TookTooLongError, call_each
from solera.tasks.schema import schema_of
from solera.tasks.tool_calls import Call
from solera.values import whole_characters

TIMEOUT = 30.0
"""Seconds for a call, by default."""
LONGEST = 4000
"""Characters of a result that the model sees, by default."""
Tool = Callable[..., Any]


class Result(NamedTuple):
    """What the model is told about a call, whether the call failed, and the seconds it took."""

    text: str
    failed: bool
    seconds: float


class Toolbox:
    """Functions by their names. Asynchronous ones run in the event loop, others in a thread each.

    A tool with an attribute `schema` brings its own JSON schema. With `one_by_one`, the calls of a turn are made one
    after the other, because they share state.
    """

    def __init__(
        self, tools: Sequence[Tool], timeout: float = TIMEOUT, longest: int = LONGEST, one_by_one: bool = False
    ) -> None:
        if not timeout > 0:
            raise SoleraError(f"tools: timeout is {timeout}; it must be above 0 seconds")
        if longest < 1:
            raise SoleraError(f"tools: longest is {longest}; it must be at least 1 character")
        self.schemas = [getattr(tool, "schema", None) or schema_of(tool) for tool in tools]
        self.timeout = timeout
        self.longest = longest
        self.one_by_one = one_by_one
        self._tools = {schema["function"]["name"]: tool for schema, tool in zip(self.schemas, tools, strict=True)}
        self._signatures = {name: inspect.signature(tool) for name, tool in self._tools.items()}
        if len(self._tools) < len(tools):
            raise SoleraError("tools: two of them have the same name")

    async def answer(self, calls: Sequence[Call], seconds: float) -> list[Result]:
        """Make all calls, each with its own time limit and at most `seconds`."""
        timeout = min(self.timeout, max(seconds, 0.001))
        if self.one_by_one:
            return [await self._call(call, timeout) for call in calls]
        return await asyncio.gather(*(self._call(call, timeout) for call in calls))

    async def _call(self, call: Call, timeout: float) -> Result:
        began = time.monotonic()
        outcome = await self._outcome(call, timeout)
        failed, taken = outcome.error is not None, time.monotonic() - began
        text = f"error: {outcome.error}" if failed else _text(outcome.value)
        return Result(self._cut(whole_characters(text)), failed, taken)

    async def _outcome(self, call: Call, timeout: float) -> Outcome:
        """The value, or an error whose text the model is shown."""
        if mistake := call.mistake or self._mistake(call):
            return Outcome(error=ValueError(mistake))
        tool = self._tools[call.name]
        if is_async(tool):
            outcome = await awaited(partial(tool, **call.arguments), timeout)
        else:
            async with aclosing(call_each(tool, [((), call.arguments)], timeout)) as outcomes:
                outcome = await anext(outcomes)
        if isinstance(outcome.error, TookTooLongError):
            return Outcome(error=ValueError(f"{call.name} took longer than {timeout:g} s"))
        if outcome.error is not None:
            said = f": {one_line(outcome.error)}" if str(outcome.error) else ""
            return Outcome(error=ValueError(f"{type(outcome.error).__name__}{said}"))
        return outcome

    def _mistake(self, call: Call) -> str | None:
        if call.name not in self._tools:
            return f"there is no tool named {call.name!r}; the tools are {', '.join(self._tools)}"
        try:
            self._signatures[call.name].bind(**call.arguments)
        except TypeError as error:
            return f"{call.name}: {error}"
        return None

    def _cut(self, text: str) -> str:
        left = len(text) - self.longest
        return text if left <= 0 else f"{text[: self.longest]}… ({left} more characters)"


def is_async(tool: Tool) -> bool:
    return inspect.iscoroutinefunction(tool) or inspect.iscoroutinefunction(getattr(type(tool), "__call__", None))  # noqa: B004


async def awaited(call: Callable[[], Awaitable[Any]], timeout: float) -> Outcome:
    """Make an asynchronous call and wait for it. One that ignores its cancellation is left behind."""

    async def made() -> Any:
        return await call()

    running = asyncio.ensure_future(made())
    try:
        await asyncio.wait([running], timeout=timeout)
    finally:
        late = not running.done()
        running.cancel()
    if late or running.cancelled():
        return Outcome(error=TookTooLongError())
    error = running.exception()
    return Outcome(None if error else running.result(), error)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)
