"""HTTP to one server. Every failure becomes an error of one line. Of the engines, only this module names httpx."""

import asyncio
import json
import os
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

CLIENTS = 32
"""Over which requests are divided. With 256 requests at once, one client takes 20 ms for each."""


class ServerError(EngineError):
    """A server did not answer, or could not do what it was asked."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """One server: calls that wait, for control, and calls that are awaited, for generation. A control call that has no
    limit of its own waits for `patience` seconds."""

    def __init__(self, url: str, patience: float = CONTROL) -> None:
        httpx = _httpx()
        self.url = url.rstrip("/")
        self.patience = patience
        key = os.environ.get(API_KEY)
        self._options: dict[str, Any] = {
            "base_url": self.url, "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "trust_env": urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"),  # no proxy to this machine
        }  # fmt: skip
        self._client = httpx.Client(**self._options, limits=httpx.Limits(max_keepalive_connections=0))
        self._awaited: tuple[asyncio.AbstractEventLoop, list[Any]] | None = None
        self._asked = 0

    def get(self, path: str, timeout: float | None = None) -> Any:
        return self._call("GET", path, None, timeout or self.patience)

    def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        return self._call("POST", path, body, timeout or self.patience)

    def _call(self, method: str, path: str, body: Any, timeout: float) -> Any:
        httpx = _httpx()
        limits = httpx.Timeout(timeout, connect=min(timeout, CONNECTING))
        try:
            return self._read(self._client.request(method, path, json=body, timeout=limits), path)
        except httpx.HTTPError as error:
            raise self._failed(path, error) from error

    async def post_awaited(self, path: str, body: Any) -> Any:
        """Post in the running event loop, without a time limit. Cancelling it closes the connection, which aborts the
        request there."""
        httpx = _httpx()
        try:
            return self._read(await self._client_of(asyncio.get_running_loop()).post(path, json=body), path)
        except httpx.HTTPError as error:
            raise self._failed(path, error) from error

    def _client_of(self, loop: asyncio.AbstractEventLoop) -> Any:
        """The next of several clients. The time that one takes for a request grows with its connections."""
        httpx = _httpx()
        if self._awaited is None or self._awaited[0] is not loop:
            options = self._options | {
                "verify": httpx.create_ssl_context(), "timeout": httpx.Timeout(None, connect=CONNECTING),
                "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE),
            }  # fmt: skip
            self._awaited = (loop, [httpx.AsyncClient(**options) for _ in range(CLIENTS)])
        self._asked += 1
        return self._awaited[1][self._asked % CLIENTS]

    def _failed(self, path: str, error: Exception) -> ServerError:
        return ServerError(f"vLLM server {self.url}{path}: {type(error).__name__}: {one_line(error)}")

    def _read(self, response: Any, path: str) -> Any:
        if response.status_code == 200:
            try:
                return response.json() if response.content else None
            except ValueError as error:
                raise GarbageError(f"vLLM server {self.url}{path} answered with no JSON: {one_line(error)}") from error
        said = f"vLLM server {self.url}{path} answered {response.status_code}: {_message(response.text)}"
        if response.status_code == 401:
            raise ServerError(f"{said}: set the environment variable {API_KEY}", 401)
        if response.status_code in (400, 422):
            raise BadRequestError(said)
        raise ServerError(said, response.status_code)

    def text(self, path: str) -> str:
        """Get a page that is not JSON."""
        httpx = _httpx()
        if self._client.is_closed:
            raise ServerError(f"vLLM server {self.url}{path}: the connection is closed")
        try:
            response = self._client.get(path, timeout=CONNECTING)
        except httpx.HTTPError as error:
            raise self._failed(path, error) from error
        return response.text if response.status_code == 200 else self._read(response, path)

    def close(self) -> None:
        self._client.close()
        if self._awaited is not None:
            loop, clients = self._awaited
            self._awaited = None
            if loop.is_running():
                for client in clients:
                    asyncio.run_coroutine_threadsafe(client.aclose(), loop).result(CONNECTING)


def _message(text: str) -> str:
    """The message inside an error that the server sent as JSON, or the text itself."""
    try:
        said = json.loads(text)
    except ValueError:
        return one_line(text) if text else "nothing"
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else said
    return one_line(error.get("message", error) if isinstance(error, dict) else error, 600)


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise SoleraError('engine.name = vllm needs httpx: pip install "solera[vllm]"') from error
    return httpx
