"""HTTP to a server: what both ways to ask make of its answers, and that nothing is left open."""

import asyncio
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from solera.engines.faults import GarbageError
from solera.engines.vllm.http import Http, ServerError
from solera.errors import BadRequestError
from solera.tasks.event_loop import EventLoop

Ask = Callable[[str, Any], Any]


class Server:
    """Answers as the path says: `/200/text`, a status and a body; `/half`; `/hang`; `/echo`, with the request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.gone = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server.asked.append((self.path, self.headers["Authorization"]))
                body = self.rfile.read(int(self.headers["Content-Length"]))
                kind, _, text = self.path[1:].partition("/")
                if kind == "hang":
                    server.gone.clear()
                    self.connection.recv(1)  # nothing, as soon as the other side closes
                    server.gone.set()
                    return
                answer = body if kind == "echo" else text.encode()
                self.send_response(int(kind) if kind.isdigit() else 200)
                self.send_header("Content-Length", str(len(answer) + (kind == "half") * 7))
                self.end_headers()
                self.wfile.write(answer)
                self.close_connection = kind == "half"

            def log_message(self, *_: object) -> None:
                return

        class Listening(ThreadingHTTPServer):
            request_queue_size = 512  # connections that are not accepted yet; the default is 5
            daemon_threads = True

        self._server = Listening(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(params=["control", "awaited"])
def ask(request: pytest.FixtureRequest, server: Server) -> Iterator[Ask]:
    http = Http(server.url)
    with EventLoop() as events:
        yield http.post if request.param == "control" else lambda path, body: events.run(http.post_awaited(path, body))
        http.close()


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("/200/no-json", GarbageError, "answered with no JSON"),
        ("/400/wrong", BadRequestError, "/400/wrong answered 400: wrong"),
        ("/422/wrong", BadRequestError, "answered 422: wrong"),
        ("/401/who", ServerError, "answered 401: who: set the environment variable VLLM_API_KEY"),
        ("/503/busy", ServerError, "answered 503: busy"),
        ("/half/1", ServerError, "/half/1: "),
    ],
)
def test_what_cannot_be_used_is_an_error_of_one_line(ask: Ask, path: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        ask(path, None)
    assert type(raised.value) is error and said in str(raised.value) and "\n" not in str(raised.value)


def test_an_answer_is_the_json_that_was_sent(ask: Ask) -> None:
    assert ask("/echo", {"a": [1, 0.25, "ü"]}) == {"a": [1, 0.25, "ü"]}
    assert ask("/200", {}) is None


def test_a_server_that_is_not_there_is_an_error_that_names_it(ask: Ask, server: Server) -> None:
    server.close()
    with pytest.raises(ServerError, match=f"vLLM server {server.url}/echo: .*Connect"):
        ask("/echo", {})


def test_the_key_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    http = Http(server.url)
    with EventLoop() as events:
        events.run(http.post_awaited("/echo", {}))
        http.post("/echo", {})
        http.close()
    assert server.asked == [("/echo", "Bearer secret")] * 2


def test_a_cancelled_request_closes_its_connection(server: Server) -> None:
    """The server then stops writing that text."""
    http = Http(server.url)
    with EventLoop() as events:
        begun = events.begin(http.post_awaited("/hang", {}))
        deadline = time.monotonic() + 20
        while not server.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not begun.wait(0.2)
        begun.cancel()
        assert server.gone.wait(20)
        http.close()


def test_requests_run_at_once_in_any_event_loop_and_nothing_stays_open(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp logs an error for what was not closed."""
    http, bodies = Http(server.url), [{"number": number} for number in range(300)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(http.post_awaited("/echo", body) for body in bodies))

    async def in_a_notebook(close: Callable[[], None]) -> None:
        close()

    with caplog.at_level(logging.DEBUG), EventLoop() as events:
        assert asyncio.run(all_at_once()) == bodies  # its loop is closed afterwards
        assert events.run(all_at_once()) == bodies
        http.close()
        with pytest.raises(ServerError, match="/echo: the connection is closed"):
            events.run(all_at_once())
        other = Http(server.url)
        asyncio.run(other.post_awaited("/echo", {}))
        asyncio.run(in_a_notebook(other.close))
        gc.collect()
    assert not [json.dumps(record.msg) for record in caplog.records if record.levelno >= logging.WARNING]
