"""Servers that a run cannot use are refused in one line."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from solera.engines.vllm.checks import Facts, check
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.versions import release_of
from solera.errors import SoleraError
from solera.run.parts import Parts
from solera.run.serving import ours_of
from tests.command import solera

pytestmark = pytest.mark.vllm


def test_what_the_server_says(engine: VllmEngine, parts: Parts) -> None:
    assert check(engine.http, ours_of(parts, 8)) == Facts(
        name=engine.facts.name, vocabulary=17, dtype="torch.float32", max_length=64, slots=engine.slots, block=32
    )
    assert engine.slots > 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": "torch.bfloat16"}, "computes in float32, this run in bfloat16: start it with --dtype bfloat16"),
        ({"needed": 65}, "reads at most 64 tokens, but a prompt and sampling.max_tokens need 65"),
        ({"max_length": 20, "needed": 21}, "reads at most 20 tokens"),
        ({"model": {"hidden_size": 128}}, r"serves another model \(.*\): its hidden_size is 64, this run's is 128"),
        ({"model": {"vocab_size": 49152}}, "its vocab_size is 17, this run's is 49152"),
        ({"tokens": [1, 2, 3]}, "has another tokenizer than this run's model"),
    ],
)
def test_a_server_of_another_kind_is_refused(
    engine: VllmEngine, parts: Parts, change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(SoleraError, match=complaint) as refused:
        check(engine.http, replace(ours_of(parts, 8), **change))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1", "1.32.0", "0.32.0rc1", "0.32.0.dev5", "dev", "0.24"])
def test_an_untested_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(SoleraError, match=f"is vLLM {version}, which Solera was not tested with"):
        release_of(version, "the server")


@pytest.fixture
def stranger() -> Iterator[str]:
    """A server of another version."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"version": "0.31.0"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_command_says_so_in_one_line(stranger: str) -> None:
    done = solera("eval", "embedded", "--engine", "vllm", "--engine.urls", stranger)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"vLLM server {stranger} is vLLM 0.31.0, which Solera was not tested with" in done.stderr


def test_no_server_is_one_line_too() -> None:
    done = solera("eval", "embedded", "--engine", "vllm", "--engine.urls", "http://127.0.0.1:9")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "vLLM server http://127.0.0.1:9/version: ConnectError" in done.stderr
