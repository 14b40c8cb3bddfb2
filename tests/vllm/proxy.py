"""A proxy in front of a real server, which spoils what passes through it."""

import contextlib
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

GENERATE = "/inference/v1/generate"


class TruncateError(Exception):
    """Send only half of the answer, and close the connection."""


class SwallowError(Exception):
    """Do not pass the request on; answer with an empty object."""


Spoil = Callable[[str, bytes, bytes | None], bytes | None]
"""Takes path, request and answer. Called twice: before the request is passed on (the answer is `None`), and after."""


class Proxy:
    """Listens on a port of its own and passes everything on to `target`. `spoil` may change answers."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.spoil: Spoil = lambda path, request, answer: answer
        self.generated = 0
        """Requests for a text so far."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: ThreadingHTTPServer | None = None
        self._connections = set[socket.socket]()
        self.start()

    def start(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                proxy._connections.add(self.connection)

            def finish(self) -> None:
                proxy._connections.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def do_GET(self) -> None:
                proxy._pass_on(self)

            def do_POST(self) -> None:
                proxy._pass_on(self)

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            request_queue_size = 256  # connections that are not accepted yet; the default is 5
            daemon_threads = True

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Break all connections, and refuse new ones."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            for connection in list(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        request = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.generated += handler.path == GENERATE
        status, whole = 200, True
        try:
            try:
                self.spoil(handler.path, request, None)
                status, answer = self._forward(handler, request)
                answer = self.spoil(handler.path, request, answer) or b""
            except SwallowError:
                answer = b"{}"
            except TruncateError:
                answer, whole = b'{"choices": [{"token_ids": [1, 2, 3', False
            handler.send_response(status)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(answer) * (1 if whole else 2)))
            handler.end_headers()
            handler.wfile.write(answer)
            handler.close_connection = not whole
        except (OSError, http.client.HTTPException):  # the client or the server has gone
            handler.close_connection = True

    def _forward(self, handler: BaseHTTPRequestHandler, request: bytes) -> tuple[int, bytes]:
        assert self.target.hostname is not None
        connection = http.client.HTTPConnection(self.target.hostname, self.target.port, timeout=120)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"} if request else {}
            connection.request(handler.command, handler.path, request or None, headers)
            response = connection.getresponse()
            return response.status, response.read()


def choice(change: Callable[[dict[str, Any]], None], first: int, last: int) -> Spoil:
    """Change the texts number `first` to `last` that pass, counted from 1. The checks of a sync ask for a token or two;
    they pass unchanged."""
    numbers = itertools.count(1)

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path != GENERATE or answer is None or json.loads(request)["sampling_params"]["max_tokens"] < 3:
            return answer
        if not first <= next(numbers) <= last:
            return answer
        said = json.loads(answer)
        change(said["choices"][0])
        return json.dumps(said).encode()

    return spoil
