"""A small HTTP server that speaks as much of the OpenAI protocol as a judge needs, and fails when it is told to."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers with the number of letters x in each response. `faults` are answered first, one after the other: a
    status, a text to answer with, or seconds to wait."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[int | str | float] = []
        self.asked: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.asked.append(body)
            server.headers.append(dict(self.headers))
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
            fault = server.faults.pop(0) if server.faults else None
        try:
            self._answer(body, fault)
        except BrokenPipeError:  # the client has given up
            pass
        finally:
            with server.lock:
                server.busy -= 1

    def _answer(self, body: dict, fault: int | str | float | None) -> None:
        if isinstance(fault, float):
            time.sleep(fault)
        text = fault if isinstance(fault, str) else scores(body)
        usage = {"prompt_tokens": 100, "completion_tokens": 7}
        answer = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
        said = json.dumps({"error": "busy\nnow"} if isinstance(fault, int) else answer).encode()
        self.send_response(fault if isinstance(fault, int) else 200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


def scores(body: dict) -> str:
    said = body["messages"][1]["content"].partition("<response")[2].split("<response_")
    counts = [min(each.count("x"), 10) for each in said]
    name = body["response_format"]["json_schema"]["name"]
    return json.dumps({name: counts if name == "scores" else counts[0]})


@contextmanager
def serving():
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
