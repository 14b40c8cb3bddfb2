"""HTTP to one server. Every failure becomes an error of one line.

Control calls wait for their answers (httpx). Requests for texts, of which there are hundreds at once, are awaited
(aiohttp): with 256 of them, httpx takes 2.2 ms of processor time for each, aiohttp 0.45 ms, next to a learner in the
same process.
"""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from solera.engines.faults import EngineError, GarbageError
from solera.errors import BadRequestError, SoleraError, one_line

API_KEY = "VLLM_API_KEY"
"""Environment variable with the server's API key. vLLM reads the same one."""
CONNECTING = 10.0
"""Seconds to wait for a connection."""
CONTROL = 120.0
"""Seconds to wait for the answer to a control call."""


IDLE = 2.0
"""Seconds after which an idle connection is not used again. vLLM closes it after 5 seconds, and a request that crosses
the closing fails. Control calls use a new connection each, because vLLM closes one after an error."""


class ServerError(EngineError):
    """A server did not answer, or could not do what it was asked."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """One server: calls that wait, for control, and calls that are awaited, for generation. A control call that has no
    limit of its own waits for `patience` seconds."""

    def __init__(self, url: str, patience: float = CONTROL) -> None:
        self._httpx, self._aiohttp = _packages()
        self.url = url.rstrip("/")
        self.patience = patience
        key = os.environ.get(API_KEY)
        self._options: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "trust_env": urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"),  # no proxy to this machine
        }
        self._client = self._httpx.Client(
            **self._options, base_url=self.url, limits=self._httpx.Limits(max_keepalive_connections=0)
        )
        self._awaited: tuple[asyncio.AbstractEventLoop, Any] | None = None
        """The event loop in which requests are awaited, and aiohttp's session there."""

    def get(self, path: str, timeout: float | None = None) -> Any:
        return self._call("GET", path, None, timeout or self.patience)

    def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        return self._call("POST", path, body, timeout or self.patience)

    def _call(self, method: str, path: str, body: Any, timeout: float) -> Any:
        limits = self._httpx.Timeout(timeout, connect=min(timeout, CONNECTING))
        try:
            response = self._client.request(method, path, json=body, timeout=limits)
        except self._httpx.HTTPError as error:
            raise self._failed(path, error) from error
        return self._read(response.status_code, response.content, path)

    async def post_awaited(self, path: str, body: Any) -> Any:
        """Post in the running event loop, without a time limit. Cancelling it closes the connection, which aborts the
        request there."""
        try:
            async with (await self._session(path)).post(f"{self.url}{path}", json=body) as response:
                status, content = response.status, await response.read()
        except self._aiohttp.ClientError as error:
            raise self._failed(path, error) from error
        return self._read(status, content, path)

    async def _session(self, path: str) -> Any:
        loop = asyncio.get_running_loop()
        if self._awaited is None or self._awaited[0] is not loop:
            self._refuse_if_closed(path)
            aiohttp, before = self._aiohttp, self._awaited
            session = aiohttp.ClientSession(
                **self._options, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING),
            )  # fmt: skip
            self._awaited = (loop, session)
            if before is not None:
                await before[1].close()
        return self._awaited[1]

    def _refuse_if_closed(self, path: str) -> None:
        if self._client.is_closed:
            raise ServerError(f"vLLM server {self.url}{path}: the connection is closed")

    def _failed(self, path: str, error: Exception) -> ServerError:
        return ServerError(f"vLLM server {self.url}{path}: {type(error).__name__}: {one_line(error)}")

    def _read(self, status: int, content: bytes, path: str) -> Any:
        if status == 200:
            try:
                return json.loads(content) if content else None
            except ValueError as error:
                raise GarbageError(f"vLLM server {self.url}{path} answered with no JSON: {one_line(error)}") from error
        said = f"vLLM server {self.url}{path} answered {status}: {_message(content.decode(errors='replace'))}"
        if status == 401:
            raise ServerError(f"{said}: set the environment variable {API_KEY}", 401)
        if status in (400, 422):
            raise BadRequestError(said)
        raise ServerError(said, status)

    def text(self, path: str) -> str:
        """Get a page that is not JSON."""
        self._refuse_if_closed(path)
        try:
            response = self._client.get(path, timeout=CONNECTING)
        except self._httpx.HTTPError as error:
            raise self._failed(path, error) from error
        status = response.status_code
        return response.text if status == 200 else self._read(status, response.content, path)

    def close(self) -> None:
        self._client.close()
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return
        loop, session = awaited
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(CONNECTING)
        else:  # its connections ended with it; in a notebook, this thread has a loop of its own
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, session.close()).result()


def _message(text: str) -> str:
    """The message inside an error that the server sent as JSON, or the text itself."""
    try:
        said = json.loads(text)
    except ValueError:
        return one_line(text) if text else "nothing"
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else said
    return one_line(error.get("message", error) if isinstance(error, dict) else error, 600)


def _packages() -> tuple[Any, Any]:
    try:
        import aiohttp
        import httpx
    except ImportError as error:
        raise SoleraError(f'engine.name = vllm needs {error.name}: pip install "solera[vllm]"') from error
    return httpx, aiohttp
