"""Tools of MCP servers. Only this module imports the package `mcp`.

A server is started twice: when its tools are listed, and at the first call of a run. All episodes share it, and it ends
with the run's event loop. If it dies or stops answering, the calls in progress fail, and the next call starts it again.
"""

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from tempfile import TemporaryFile
from typing import Any
from weakref import WeakKeyDictionary

from solera.errors import SoleraError, one_line
from solera.tasks.event_loop import EventLoop

START = 30.0
"""Seconds that a server has to start and to list its tools."""
ALIVE = 5.0
"""After a call has failed, the server has this many seconds to show that it still answers."""


class McpError(Exception):
    """What a server said about a call that failed. The model is shown the text, so it does not name the command: there
    may be a key in it."""


def mcp_tools(
    server: str | Sequence[str], *, only: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> list["McpTool"]:
    """The tools of an MCP server, for an `Agent`.

    `server` is a command, which is started and spoken to through its standard input and output, or the address of a
    running server (streamable HTTP). `only` names the tools to use. The command gets `env` and few variables of the
    environment besides (HOME, PATH and the like).
    """
    connection = Connection(server, dict(env or {}))
    with EventLoop() as events:
        tools = events.run(connection.tools())
    if missing := sorted(set(only or ()) - {tool.name for tool in tools}):
        had = ", ".join(tool.name for tool in tools)
        raise SoleraError(f"mcp_tools: {connection.name} has no tool named {missing[0]!r}; its tools are {had}")
    return [tool for tool in tools if only is None or tool.name in only]


class McpTool:
    """A tool of a server: an asynchronous function with a ready-made schema."""

    def __init__(self, connection: "Connection", name: str, about: str, parameters: dict[str, Any]) -> None:
        self.connection = connection
        self.name = name
        self.schema = {
            "type": "function", "function": {"name": name, "description": about, "parameters": parameters}
        }  # fmt: skip

    async def __call__(self, /, **arguments: Any) -> str:
        return await self.connection.call(self.name, arguments)


class Connection:
    """A server. Each event loop gets its own session; a run has one event loop."""

    def __init__(self, server: str | Sequence[str], env: dict[str, str]) -> None:
        self.command = shlex.split(server) if isinstance(server, str) else list(server)
        if not self.command:
            raise SoleraError("mcp_tools: the command is empty: give the command of a server, or its address")
        self.name = self.command[0] if len(self.command) == 1 else repr(shlex.join(self.command))
        self.env = env
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = WeakKeyDictionary()

    async def tools(self) -> list[McpTool]:
        """Start the server, and list its tools."""
        try:
            async with asyncio.timeout(START):
                client = await self._session().ready()
                listed, page = list[Any](), await client.list_tools()
                listed += page.tools
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    listed += page.tools
        except TimeoutError:
            raise SoleraError(f"mcp_tools: {self.name} did not list its tools within {START:g} s") from None
        except McpError as error:
            raise SoleraError(f"mcp_tools: {self.name}: {error}") from error
        return [McpTool(self, tool.name, tool.description or tool.title or "", tool.input_schema) for tool in listed]

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        session = self._session()
        client = await session.ready()
        try:
            result = await client.call_tool(tool, arguments)
        except BaseException as error:  # also if the call takes too long and is cancelled
            session.check()
            if isinstance(error, Exception):
                raise McpError(one_line(error)) from error
            raise
        text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
        if result.is_error:
            raise McpError(text)
        return text

    def _session(self) -> "Session":
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.over.is_set():
            session = self._sessions[loop] = Session(self)
        return session

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        """A connected client of the package `mcp`."""
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError as error:
            raise McpError(f"{one_line(error)}: install the extra mcp: pip install 'solera[mcp]'") from error
        if self.command[0].startswith(("http://", "https://")):
            async with Client(self.command[0]) as client:
                yield client
            return
        with TemporaryFile("w+", errors="replace") as said:  # a server may write a line for every call
            parameters = StdioServerParameters(command=self.command[0], args=self.command[1:], env=self.env)
            try:
                async with Client(stdio_client(parameters, said)) as client:
                    yield client
            except Exception as error:
                raise McpError(f"the server failed: {_last_line(said) or _cause(error)}") from error


class Session:
    """A started server. One task opens and closes the connection, as the package asks for. It is cancelled, and so ends
    the server, when the event loop ends."""

    def __init__(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.over = asyncio.Event()
        self._client: asyncio.Future[Any] = loop.create_future()
        # Not in the context of the episode that happens to be the first.
        self._holding = loop.create_task(self._hold(), context=Context())
        self._checking: asyncio.Task[None] | None = None

    async def ready(self) -> Any:
        """The client, once the server has started."""
        return await asyncio.shield(self._client)

    def check(self) -> None:
        """End the session unless the server still answers."""
        if self._checking is None and not self.over.is_set():
            self._checking = asyncio.get_running_loop().create_task(self._check(), context=Context())

    async def _check(self) -> None:
        try:
            async with asyncio.timeout(ALIVE):
                await self._client.result().list_tools(cache_mode="bypass")
        except Exception:  # whatever it is, this session is of no use
            self.over.set()
        finally:
            self._checking = None

    async def _hold(self) -> None:
        try:
            async with asyncio.timeout(START) as starting, self.connection.open() as client:
                starting.reschedule(None)
                self._client.set_result(client)
                await self.over.wait()
        except TimeoutError:
            self._fail(McpError(f"the server did not start within {START:g} s"))
        except McpError as error:
            self._fail(error)
        except Exception as error:
            self._fail(McpError(f"the server failed: {_cause(error)}"))
        finally:
            self.over.set()

    def _fail(self, error: McpError) -> None:
        if not self._client.done():
            self._client.set_exception(error)


def _last_line(said: Any) -> str:
    said.seek(0)
    return next((line.strip() for line in reversed(said.read().splitlines()) if line.strip()), "")


def _cause(error: BaseException) -> str:
    """The first error of a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error) if str(error) else type(error).__name__
